import sys, torch, json, time, contextlib
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from lowbit.checkpoint import CheckpointReader, expected_tensors
from lowbit.eval import sample_text, divergence, perplexity
from lowbit.models.learn import rounded_activations
f=str(Path.home()/".cache/lowbit/smollm2-135m-instruct")
tok=AutoTokenizer.from_pretrained(f); ref=AutoModelForCausalLM.from_pretrained(f,dtype=torch.float32).eval()
ids=torch.tensor(tok(sample_text(),verbose=False).input_ids[:2*1024])
import copy
for name in sys.argv[1:]:
    m=copy.deepcopy(ref); h=m.get_output_embeddings(); h.weight=torch.nn.Parameter(h.weight.detach().clone())
    with CheckpointReader(name) as r:
        layers={n:r.layer(n) for n in r.manifest.layers}
        q={t for n,e in r.manifest.layers.items() for t in expected_tensors(n,e)}
        state={n:r.get(n).float() for n in r.names() if n not in q}
    state |= {f"{n}.weight":v.dequantize() for n,v in layers.items()}
    state.setdefault("lm_head.weight",state["model.embed_tokens.weight"])
    m.load_state_dict(state,strict=True)
    for n,v in layers.items():
        if v.scheme.activation is not None:
            m.get_submodule(n).register_forward_pre_hook(lambda mod,a,v=v: (rounded_activations(a[0],v.scheme,v.activation_scale,v.activation_zero),))
    t=time.time()
    with torch.no_grad(): d=divergence(m,ref,ids,window=1024)
    print(name, {x.metric:round(x.value,5) for x in d.figures()}, f"{time.time()-t:.0f} s", flush=True)
