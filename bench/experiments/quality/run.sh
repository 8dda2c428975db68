#!/bin/bash
# CARRY = folder of this script, OUT = where results go. Wants the demo's model (~/.cache/lowbit/smollm2-135m-instruct, or
# the wheel in /tmp/m with gguf in /tmp/site).
set -u
rm -rf /tmp/qual; mkdir -p /tmp/qual "$OUT"; tar -C /tmp/qual -xJf "$CARRY/tree.tarx"; tar -C /tmp/qual -xJf "$CARRY/texts.tarx"
cd /tmp/qual
export PYTHONPATH=/tmp/qual:/tmp/site OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/qual/triton
M=$(timeout 60 python3 -c "
from pathlib import Path; from lowbit.demo import bring_model
print(bring_model(lambda line: None, next(iter(Path('/tmp/m').glob('*.whl')), None)))" 2> "$OUT/model.err")
sha256sum "$M/model.safetensors" | cut -c1-16; echo "expected $(cat "$CARRY/sha16")"
S=$(date +%s)
left() { local t=$(( $1 - $(date +%s) + S )); echo $(( t > 1 ? t : 1 )); }
study() { timeout -s INT -k 5 $(left 290) python3 -m study "$M" --data texts --device cuda --results "r-$1" --only "$2" --name "$1" --page none.md --table "r-$1.tab" > "$OUT/study-$1.log" 2>&1; cp "r-$1/$1.json" "$OUT/" 2>/dev/null; echo "study $1 rc $? $(( $(date +%s) - S )) s"; }
q() { local n=$1; shift; timeout -s INT -k 5 $(left 270) python3 -c 'from lowbit.cli import main; main()' quantize "$M" "$n" --device cuda "$@" > "$OUT/q-$n.log" 2>&1; echo "$n rc $? $(( $(date +%s) - S )) s" >> "$OUT/times.txt"; }
e() { local n=$1; shift; timeout -s INT -k 5 $(left 330) python3 -c 'from lowbit.cli import main; main()' eval "$@" --reference "$M" --suite text --windows 8 --out "e-$n" > "$OUT/e-$n.log" 2>&1; cp "e-$n/results.json" "$OUT/e-$n.json" 2>/dev/null || cp "e-$n"/results*.json "$OUT/e-$n.json"; echo "eval $n rc $? $(( $(date +%s) - S )) s"; }
LEARN="--method learned --samples 64 --iterations 100"
study s1 'w4a16_g64 learned topics seed 0' &
study s2 'w4a16_g64 learned rotate=True topics seed 0' &
study s3 'w3a16_g64 learned topics seed 0' &
study s4 'w4a16_pc learned topics seed 0' &
study s5 'w2a16_g32 *' &
study s6 '*[qn] rotate=True*' &      # rtn and gptq
( q l4-48 --scheme w4a8_g64 $LEARN; q l4-48r --scheme w4a8_g64 $LEARN --rotate; e l48 l4-48 l4-48r ) &
( q l-fp8 --scheme fp8_dynamic $LEARN; q l-88 --scheme w8a8 $LEARN --rotate; e lfp8 l-fp8 l-88 ) &
( q l3 --scheme w3a16_g64 $LEARN; q g3 --scheme w3a16_g64 --method gptq; e w3 l3 g3 ) &
( q l2 --scheme w2a16_g32 $LEARN; q g2 --scheme w2a16_g32 --method gptq; e w2 l2 g2 ) &
( q l4r --scheme w4a16_g64 $LEARN --rotate; q g4 --scheme w4a16_g64 --method gptq; q g4r --scheme w4a16_g64 --method gptq --rotate
  q r4 --scheme w4a16_g64; q r4r --scheme w4a16_g64 --rotate; e w4 l4r g4 g4r r4 r4r ) &
a8() { q r88$1 --scheme w8a8 $1; q s88$1 --scheme w8a8 --method smoothquant --samples 32 $1; q r48$1 --scheme w4a8_g64 $1
  q g48$1 --scheme w4a8_g64 --method gptq $1; q f8$1 --scheme fp8_dynamic $1; q gf8$1 --scheme fp8_dynamic --method gptq $1
  e a8$1 r88$1 s88$1 r48$1 g48$1 f8$1 gf8$1; }
a8 "" &
a8 --rotate &
wait
echo "all $(( $(date +%s) - S )) s"; cat "$OUT/times.txt"
python3 - "$OUT" <<'P'
import json, sys
from pathlib import Path
for p in sorted(Path(sys.argv[1]).glob("e-*.json")):
    for m in json.loads(p.read_text())["models"]:
        f = {x["metric"]: x["value"] for x in m["figures"]}
        print(Path(m["model"]).name[:22], {k: round(v, 4) for k, v in f.items() if v is not None})
for p in sorted(Path(sys.argv[1]).glob("s?.json")):
    for r in json.loads(p.read_text())["rows"]:
        kl = [c["KL mean"][0] for t, c in r["figures"].items() if "KL mean" in c and t != "seen"]
        print(p.stem, r["key"], round(r["seconds"], 1), "KL", round(sum(kl) / max(len(kl), 1), 4), r["bits_per_weight"])
P
grep -lE "Traceback|error:" "$OUT"/*.log | while read f; do echo "$f"; grep -E "rror" "$f" | tail -2 | cut -c1-200; done
