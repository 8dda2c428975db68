"""`lowbit tune`: times the tiles that fit a model's products on this GPU and keeps the fastest.

timing.py   CUDA graphs, rotating weights, a warm machine: how anything is timed here and in benchmarks/
trials.py   which tiles are tried for a product, and what each takes
run.py      the products of a model, the run, and the file in which the result is kept (kernels/choose/tuned.py reads it)
"""
