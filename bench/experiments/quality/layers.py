"""python layers.py NAME=scheme/method/rotate ...: the first layers quantized, mean KL on some windows."""
import lowbit; print(lowbit.__file__)
import sys, time
from dataclasses import replace
from pathlib import Path
import torch, tempfile, shutil
from transformers import AutoModelForCausalLM, AutoTokenizer
from lowbit.eval import sample_text
from lowbit.eval.divergence import compare
from lowbit.formats import parse_scheme
from lowbit.models import calibrate as C
from lowbit.models.decoder import Decoder
from lowbit.models.rotate import RotatedReader
from lowbit.checkpoint import CheckpointReader
from lowbit.quantize import Gptq, Learned, Rtn, Awq
torch.set_grad_enabled(False)
L, W = 4, 2
f=Path.home()/".cache/lowbit/smollm2-135m-instruct"
tok=AutoTokenizer.from_pretrained(f)
ids=torch.tensor(tok(sample_text(),verbose=False).input_ids[:W*1024])
m=AutoModelForCausalLM.from_pretrained(f,dtype=torch.float32).eval()
refs=[m(x[None],use_cache=False).logits[0,:-1] for x in ids.split(1024)]
h=m.get_output_embeddings(); h.weight=torch.nn.Parameter(h.weight.detach().clone(),requires_grad=False)
plain={n:p.detach().clone() for n,p in m.state_dict().items()}; plain.setdefault("lm_head.weight",plain["model.embed_tokens.weight"])
tokens=C.Calibration(64,256).tokens(f)
METHODS={"gptq":Gptq(),"learned":Learned(40),"awq":Awq("loss")}
for spec in sys.argv[1:]:
    s,method,*rot=spec.split("/"); inputs="in" in rot; rot=[r for r in rot if r!="in"]; scheme=parse_scheme(s); t=time.time(); cpu=time.process_time()
    reader=RotatedReader(f,0) if rot else CheckpointReader(f)
    state=dict(plain)
    if rot: state.update({n:reader.get(n).float() for n in reader.names()})
    if method!="none":
        blocks={n:64 for n,x in m.named_modules() if isinstance(x,torch.nn.Linear) and "lm_head" not in n and int(n.split(".")[2])<L} if inputs else {}
        decoder=Decoder(reader,"cpu",torch.float32,blocks)
        names=[n for n,x in m.named_modules() if isinstance(x,torch.nn.Linear) and "lm_head" not in n and int(n.split(".")[2])<L]
        schemes=dict.fromkeys(names,scheme)
        Decoder.__len__=lambda self: L
        target=Path(f"/tmp/quality/four/{spec.replace('/','-')}"); target.parent.mkdir(exist_ok=True)
        finished=C.Finished(target,{"spec":spec})
        if False:
            for i in range(L): shutil.copy(f"/tmp/quality/l4r-layers/layer-{i:05}.safetensors", finished.folder)
        C.calibrate_layers(decoder,schemes,METHODS[method],tokens,finished)
        results=C.Results(decoder,finished,schemes)
        for n in names: state[f"{n}.weight"]=replace(results.quantized(n),hadamard=blocks.get(n,0)).dequantize()
        for n in list(state):
            if n.startswith("model.layers.") and int(n.split(".")[2])<L and (c:=results.changed(n)) is not None: state[n]=c.float()
        errors=[finished.read(i,{k.removeprefix(f"model.layers.{i}."):v for k,v in schemes.items() if k.startswith(f"model.layers.{i}.")}).error for i in range(L)]
    m.load_state_dict(state,strict=True)
    kl,same,nll=[],[],[]
    for x,p in zip(ids.split(1024),refs):
        k,a,d=compare(p,m(x[None],use_cache=False).logits[0,:-1],x[1:]); kl.append(k); same.append(a); nll.append(d)
    kl,same,nll=torch.cat(kl),torch.cat(same),torch.cat(nll)
    print(f"{spec:26s} KL {kl.mean():.5f} median {kl.median():.5f} 99% {kl.quantile(.99):.4f} top1 {same.float().mean():.4f} nll {nll.mean():+.5f}  {time.time()-t:.0f} s wall {time.process_time()-cpu:.0f} s cpu", errors if method=="learned" else "", flush=True)
