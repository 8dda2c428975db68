"""Benchmarks whose tables and plots are generated from result files; `python -m benchmarks --help` lists them.

They stay in the repository: the wheel has `lowbit bench MODEL` and `lowbit tune`. How a call is timed is lowbit/tune/timing.py.

request.py    what to measure: schemes, shapes N x K, numbers of rows M
limits.py     the bytes and operations a product cannot avoid, and the time they take at the measured ceilings
protocol.py   how a product is measured: rotating weights, poisoned outputs checked in float64
ceilings.py   what the machine reads and multiplies at best
gemm.py       the run: ceilings, cuBLAS, this library, then every peer in a process of its own
peers.py      one short adapter per peer
results.py    the file: machine, versions, ceilings, rows
report.py, plot.py
mechanisms/   conversions, scales, tiles, each with and without (docs/internals/mechanisms.md)
"""
