#!/bin/bash
# CARRY: this folder; two groups of engines, then correctness.
set -u
CARRY=$(realpath $CARRY); rm -rf /tmp/vllm-tree; mkdir -p /tmp/vllm-tree $OUT; OUT=$(realpath $OUT)
T0=$SECONDS; say() { echo "[$((SECONDS - T0)) s] $*"; }
bash $CARRY/unpack.sh $CARRY || exit 1
tar xJf $CARRY/tree.tarx -C /tmp/vllm-tree && cd /tmp/vllm-tree || exit 1
say unpacked
export PYTHONPATH=/tmp/vllm-site:$PWD PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0 \
  GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false VLLM_CACHE_ROOT=/tmp/vllm-cache OMP_NUM_THREADS=2
nvidia-smi --query-gpu=memory.used --format=csv,noheader
timeout -s INT -k 5 ${L1:-230} python3 -m lowbit.bench.vllm --out $OUT/one.json --together 4 --limit 150 \
  --impls vllm:bf16 vllm:int4 lowbit:w4a16_g128 lowbit:w6e3m2a16 2> $OUT/one.log
say "group 1: rc $?"
timeout -s INT -k 5 ${L2:-170} python3 -m lowbit.bench.vllm --out $OUT/two.json --together 3 --limit 120 \
  --impls vllm:fp8 lowbit:fp8_dynamic lowbit:w8a8 2> $OUT/two.log
say "group 2: rc $?"
timeout -s INT -k 5 ${L3:-130} python3 -m pytest -q -n 4 -rP -p no:cacheprovider tests/vllm/test_gpu.py -k "w4a16 or w6 or w8a8 or fp8" > $OUT/correct.log 2>&1
say "correctness: rc $?"; grep -E "nats per token|passed|failed|^E  .*(Error|assert)" $OUT/correct.log | cut -c1-240 | tail -20
for f in one two; do [ -e $OUT/$f.log ] && grep -hE "^[A-Za-z.]*(Error|Refus|Exception)|ModuleNotFound|out of memory|Using .*(Kernel|FLASH)|took [0-9.]+ s" $OUT/$f.log | cut -c1-220 | sort | uniq -c | sort -nr | head -30; done
cd $OUT; tail -c 400000 one.log > o && mv o one.log; tail -c 400000 two.log > o && mv o two.log 
