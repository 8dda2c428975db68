"""`python -m benchmarks mechanisms`: what makes low-bit kernels fast, each mechanism measured with and without.

ways.py      conversions that the library does not use, as data: cvt, segments of 4 + 2 bits, exponents without a shift
loops.py     microkernels: a conversion or a step in a loop over registers, in clocks and instructions
products.py  the library's kernels with each conversion; tiles: swizzle, stages, split-K, sliced-K; TensorRT-LLM's order
fused.py     one kernel beside dequantize-then-multiply, and cuBLAS alone
counters.py  bytes and tensor cores by the hardware's counters, where the profiler gives them
layouts.py   convolutions: channel layouts, channels that are filled up
run.py       the run and its result file; report.py its tables
"""
