# Call 2: mechanisms, tiles of weights nobody tuned, attention beside FlashAttention-3 (with .gpu/vllm's _vllm_fa3_C; vllm/unpack.sh)
. .gpu/next/begin.sh
run 150 mech python3 -m lowbit bench mechanisms --parts sums,lines --out $OUT/mechanisms.json; tail -60 $OUT/mech.log
run 90 counters python3 -m lowbit bench mechanisms --parts counters --out $OUT/counters.json; tail -20 $OUT/counters.log
run 130 tune python3 .gpu/next/tune.py; tail -20 $OUT/tune.log
PYTHONPATH=/tmp/vllm-site:$PWD run 60 fa3 python3 .gpu/next/fa3.py; tail -12 $OUT/fa3.log
