import json, os, torch
from lowbit.bench import e2e
from lowbit.bench.ceilings import read_bandwidth
from lowbit.bench.protocol import warm_up
warm_up(); bw, _ = read_bandwidth(); rows = []
asked = e2e.Asked(("Llama-2-70B",), ("w6e3m2a16",), (1, 2, 4, 8, 32), (1024,))
for r in e2e._rows_of("Llama-2-70B", "w6e3m2a16", asked, bw, print):
    rows.append(r); json.dump({"bw": bw, "rows": rows}, open(os.environ["OUT"] + "/seventy.json", "w"), default=str)
    print({k: r.get(k) for k in ("batch", "ms_per_token", "limit_ms", "prefill_tok_s", "prefill_products", "step_wall_ms", "kernels_per_layer", "error")}, flush=True)
