import json, os, torch
from lowbit.bench import e2e
from lowbit.bench.language_model import random_model
m = random_model("Llama-3-8B", None, None, torch.float16, torch.device("cuda"))
for r in e2e._rivals(m, e2e.Asked(("Llama-3-8B",), (), (1,), (1024,), rivals=("eager", "static")), print):
    print(r, flush=True)
