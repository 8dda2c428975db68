import sys, time, json, re
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from lowbit.eval import sample_text
from lowbit.eval.divergence import compare
from lowbit.formats import parse_scheme
from lowbit.models.learn import rounded_activations
from lowbit.models.rotate import RotatedReader
from lowbit.checkpoint import CheckpointReader
from lowbit.quantize.rotate import Rotation
from lowbit.quantize.rtn import rtn
torch.set_grad_enabled(False)
W=int(sys.argv[1]); CONFIGS=sys.argv[2:]
f=str(Path.home()/".cache/lowbit/smollm2-135m-instruct")
tok=AutoTokenizer.from_pretrained(f)
ids=torch.tensor(tok(sample_text(),verbose=False).input_ids[:W*1024])
m=AutoModelForCausalLM.from_pretrained(f,dtype=torch.float32).eval()
refs=[m(x[None],use_cache=False).logits[0,:-1] for x in ids.split(1024)]
h=m.get_output_embeddings(); h.weight=torch.nn.Parameter(h.weight.detach().clone(),requires_grad=False)
plain={n:p.detach().clone() for n,p in m.state_dict().items()}
plain.setdefault("lm_head.weight",plain["model.embed_tokens.weight"])
rot=None
def rotated():
    global rot
    if rot is None:
        r=RotatedReader(f,0); rot={n:r.get(n).float() for n in r.names()}
    return rot
class Blocks:
    def __init__(s,n,b,seed): s.b=b; s.r=Rotation(b,seed); s.n=n
    def __call__(s,x): return s.r.apply(x.unflatten(-1,(-1,s.b))).flatten(-2)
for c in CONFIGS:
    # e.g. "w8a8", "w8a8/rot", "w8a8/rot/down=128/o=64", "a8only" weight none
    parts=c.split("/"); opt=dict(p.partition("=")[::2] for p in parts[1:])
    scheme=parse_scheme(parts[0])
    t=time.time()
    m.load_state_dict({**plain,**(rotated() if "rot" in opt else {})},strict=False)
    hooks=[]
    a16=[k for k in opt.get("a16","").split(",") if k]
    for n,mod in m.named_modules():
        if not isinstance(mod,torch.nn.Linear) or "lm_head" in n: continue
        kind=n.split(".")[-1].replace("_proj","")
        turn=None
        if kind in opt:
            b=int(opt[kind]) or mod.in_features
            turn=Blocks(mod.in_features,b,7)
            mod.weight.copy_(turn(mod.weight))
        if "wno" not in opt:
            mod.weight.copy_(rtn(mod.weight,scheme if scheme.static_activations is False else scheme).dequantize())
        def hook(module,a,turn=turn,q=scheme.activation is not None and kind not in a16 and "ano" not in opt):
            x=a[0] if turn is None else turn(a[0])
            return (rounded_activations(x,scheme) if q else x,)
        hooks.append(mod.register_forward_pre_hook(hook))
    kl,same,nll=[],[],[]
    for x,p in zip(ids.split(1024),refs):
        q=m(x[None],use_cache=False).logits[0,:-1]
        k,s,d=compare(p,q,x[1:]); kl.append(k); same.append(s); nll.append(d)
    for hk in hooks: hk.remove()
    kl,same,nll=torch.cat(kl),torch.cat(same),torch.cat(nll)
    print(f"{c:42s} KL {kl.mean():.5f} median {kl.median():.5f} 99% {kl.quantile(.99):.4f} top1 {same.float().mean():.4f} nll {nll.mean():+.5f}  {time.time()-t:.0f} s",flush=True)
