"""`python -m benchmarks mechanisms`: measures what makes low-bit kernels fast, each mechanism switched on and off.

ways.py      conversions that the library does not use, as data: cvt, segments of 4 + 2 bits, exponents without a shift
loops.py     microkernels: a conversion or a step in a loop over registers, in clocks and instructions
products.py  the library's kernels with each conversion; tiles: swizzle, stages, split-K, sliced-K; TensorRT-LLM's order
fused.py     one kernel, dequantize-then-multiply in two kernels, and cuBLAS alone
counters.py  bytes moved and tensor-core utilization from hardware counters, if the profiler is available
layouts.py   convolutions: channel layouts, padded channels
run.py       the run and its result file; report.py its tables
"""
