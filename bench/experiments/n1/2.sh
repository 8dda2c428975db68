# the same machine, still warm, or carry .gpu/vllm .gpu/f .gpu/n1 again: pydantic, which the command line wants, is of vllm-site
bash .gpu/vllm/unpack.sh .gpu/vllm
. .gpu/n1/begin.sh; export PYTHONPATH=$R:/tmp/site:/tmp/vllm-site; C=$R/.gpu/n1
G="python3 -m lowbit bench gemm --formats w4a16_g128,w6e3m2a16,w8a16 --shapes 4096x4096,28672x4096 --m 1,16,64,256,1024 --peers none"
run 90 f16 $G --out $OUT/f16.json; run 90 bf16 $G --dtype bfloat16 --out $OUT/bf16.json
run 90 learned bash $C/learned.sh $C; tail -9 $OUT/learned.log | cut -c1-120
run 120 counters python3 -m lowbit bench mechanisms --parts counters --out $OUT/counters.json; tail -20 $OUT/counters.log
run 130 tune python3 $C/tune.py; tail -20 $OUT/tune.log
cd $OUT; tar -cJf logs.tar.xz *.log *.json; rm -f *.log *.json
