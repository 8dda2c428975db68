"""Benchmarks. Their tables and plots are generated from result files; `python -m benchmarks --help` lists them.

The wheel does not contain this folder; it has `lowbit bench MODEL` and `lowbit tune`. lowbit/tune/timing.py times a call, for
these benchmarks and for `lowbit tune`.

request.py    what to measure: schemes, shapes N x K, numbers of rows M
limits.py     the bytes and operations a product cannot avoid, and the time they take at the measured ceilings
protocol.py   how a product is measured: rotating weights, poisoned outputs checked in float64
ceilings.py   the highest measured read bandwidth and fp16 rate of the machine
gemm.py       the run: ceilings, cuBLAS, this library, then each peer in a separate process
peers.py      one short adapter per peer
results.py    the file: machine, versions, ceilings, rows
report.py, plot.py
mechanisms/   measures the effect of conversions, scales, tiles (docs/internals/mechanisms.md)
"""
