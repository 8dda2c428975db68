# carry .gpu/vllm .gpu/f .gpu/prod2 .gpu/c1
set -u
R=$PWD; V=$R/.gpu/vllm; F=$R/.gpu/f; P=$R/.gpu/prod2; C=$R/.gpu/c1; mkdir -p $OUT; OUT=$(realpath $OUT); export OUT
T0=$SECONDS; say() { echo "[$((SECONDS - T0)) s] $*"; }
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=200
bash $V/unpack.sh $V & U=$!
mkdir -p /tmp/site; tar -C /tmp -xJf $F/mini.tarx; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site /tmp/mini/*.whl 2>&1 | grep -v WARN
wait $U; say unpacked
( export PYTHONPATH=/tmp/vllm-site:$R VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false VLLM_CACHE_ROOT=/tmp/vllm-cache OMP_NUM_THREADS=2
  timeout -s INT -k 5 330 python3 $F/gate.py --out $OUT/three.json --together 3 --limit 320 --impls vllm:int4 lowbit:w4a16_g128 lowbit:w4a8_g128 > $OUT/three.txt 2> $OUT/three.log; say "vllm: rc $?" ) & VL=$!
export OMP_NUM_THREADS=1 PYTHONPATH=$R:/tmp/site
T="python3 -m pytest -m gpu -p no:cacheprovider --tb=short -rf -v"
( timeout -s INT -k 5 185 $T -n 10 --dist worksteal $(tr '\n' ' ' < $C/left.txt) > $OUT/left.log 2>&1; say "left rc $?" ) & TS=$!
S="compute-sanitizer --tool memcheck --error-exitcode 9 $T"
( export PYTORCH_NO_CUDA_MEMORY_CACHING=1; timeout -s INT -k 5 170 $S tests/ops/test_fragment_gemm.py -k "scales_in_bf16" > $OUT/san1.log 2>&1; say "san1 rc $?" ) & S1=$!
( export PYTORCH_NO_CUDA_MEMORY_CACHING=1; timeout -s INT -k 5 170 $S tests/kernels/elementwise/test_rotate.py > $OUT/san2.log 2>&1; say "san2 rc $?" ) & S2=$!
( export PYTORCH_NO_CUDA_MEMORY_CACHING=1; timeout -s INT -k 5 170 $S tests/ops/test_fragment_gemm.py tests/ops/test_wide_gemm.py tests/ops/test_every_tile.py -k "batch-invariant or batch_invariant or in_turn" > $OUT/san3.log 2>&1; say "san3 rc $?" ) & S3=$!
wait $TS $S1 $S2 $S3
for f in left san1 san2 san3; do echo == $f; grep -hE "^FAILED|^E  |passed|failed|ERROR SUMMARY" $OUT/$f.log | cut -c1-170 | tail -9; grep -c PASSED $OUT/$f.log; done
for i in $(seq 60); do [ $(ls /tmp/started-* 2>/dev/null | wc -l) = 3 ] && break; sleep 1; done; say gate
touch /tmp/go; wait $VL; cut -c1-110 $OUT/three.txt; grep -h "oading took\|oading weights took" $OUT/three.log | cut -c1-160
tail -c 300000 $OUT/three.log > $OUT/o; mv $OUT/o $OUT/three.log
CARRY=$P PART="pieces" LIMIT=85 bash $P/run.sh > $OUT/pieces.txt 2>&1; say pieces; tail -c 2300 $OUT/pieces.txt
CARRY=$P PART="streamk" LIMIT=95 bash $P/run.sh > $OUT/streamk.txt 2>&1; say streamk; tail -c 2600 $OUT/streamk.txt
PYTHONPATH=/tmp/vllm-site:$R timeout -s INT -k 5 40 python3 $C/fa3.py > $OUT/fa3.log 2>&1; say fa3; tail -7 $OUT/fa3.log | cut -c1-300
cd $OUT; tar -cJf logs.tar.xz *.log *.txt; rm -f *.log *.txt; ls
