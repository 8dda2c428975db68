from lowbit.bench import tune
shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 13824)]
for r in tune.run({"w4a16_g128": shapes}, tune.TOKENS, 120, print, lambda *_: None):
    print(r.n, r.k, r.kept)
