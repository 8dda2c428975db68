#!/bin/bash
# Before: git archive HEAD lowbit tests pyproject.toml | xz -9 > $CARRY/tree.tarx (the tree is no older than the commit that adds
# lowbit/vllm/complete.py). CARRY: this folder; OUT: results; PART=1: correctness and the first group of engines, PART=2: the second group, all: both.
set -u
CARRY=$(realpath $CARRY); rm -rf /tmp/vllm-tree; mkdir -p /tmp/vllm-tree $OUT; OUT=$(realpath $OUT)
T0=$SECONDS; say() { echo "[$((SECONDS - T0)) s] $*"; }
bash $CARRY/unpack.sh $CARRY || exit 1
tar xJf $CARRY/tree.tarx -C /tmp/vllm-tree && cd /tmp/vllm-tree || exit 1
say unpacked
export PYTHONPATH=/tmp/vllm-site:$PWD PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 \
  GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false VLLM_CACHE_ROOT=/tmp/vllm-cache OMP_NUM_THREADS=2
timeout 90 python3 -c "
import vllm, torch
from vllm import LLM
from vllm.platforms import current_platform as p
import vllm.vllm_flash_attn.flash_attn_interface as f
print('vllm', vllm.__version__, type(p).__name__, p.get_device_capability(), 'FA3', f.FA3_AVAILABLE, 'machete', hasattr(torch.ops._C, 'machete_mm'))
" 2> $OUT/import.log || { tail -25 $OUT/import.log; exit 1; }
say imported
PART=${PART:-all}
if [ $PART != 2 ]; then
  timeout 150 python3 -m pytest -q -n 4 -rP -p no:cacheprovider tests/vllm/test_gpu.py -k "w4a16 or w6 or w8a8 or fp8" > $OUT/correct.log 2>&1
  say "correctness: rc $?"; timeout 120 python3 -m pytest -q -p no:cacheprovider -m gpu tests/vllm/test_product.py > $OUT/product.log 2>&1
  say "layers, and no kernel compiled for a request: rc $?"; tail -3 $OUT/product.log | cut -c1-240; grep -E "nats per token|passed|failed|^E  " $OUT/correct.log | cut -c1-240 | tail -40
  timeout 210 python3 -m lowbit.bench.vllm --out $OUT/one.json --together 3 --limit 150 \
    --impls vllm:bf16 vllm:int4 lowbit:w4a16_g128 2> $OUT/one.log
  say "group 1: rc $?"
fi
if [ $PART != 1 ]; then
  timeout 230 python3 -m lowbit.bench.vllm --out $OUT/two.json --together 4 --limit 150 \
    --impls lowbit:w6e3m2a16 vllm:fp8 lowbit:fp8_dynamic lowbit:w8a8 2> $OUT/two.log
  say "group 2: rc $?"
fi
for f in one two; do [ -e $OUT/$f.log ] && grep -hE "^[A-Za-z.]*(Error|Refus|Exception)|out of memory|Using .*(Kernel|FLASH)|took [0-9.]+ s" $OUT/$f.log | cut -c1-220 | sort | uniq -c | sort -nr | head -30; done
nvidia-smi --query-gpu=memory.used,clocks.sm,power.draw --format=csv,noheader
