"""Low-bit neural networks on NVIDIA GPUs: quantize, convert, evaluate, serve and run them."""
