"""`lowbit tune`: times the feasible tiles of a model's products on this GPU and stores the fastest.

timing.py   CUDA graphs, rotating weights, warm clocks; used here and in benchmarks/
trials.py   the candidate tiles of a product and their times
run.py      the products of a model, the run, and the result file (kernels/choose/tuned.py reads it)
"""
