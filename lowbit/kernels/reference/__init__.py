"""The results that every kernel must compute, in as few lines of torch as possible. Tests and benchmarks import them."""
