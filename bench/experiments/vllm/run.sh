# carry .gpu/vllm .gpu/f .gpu/prod2 .gpu/had2 .gpu/n; $OUT
set -u
R=$PWD; V=$R/.gpu/vllm; F=$R/.gpu/f; P=$R/.gpu/prod2; mkdir -p $OUT; OUT=$(realpath $OUT); export OUT
T0=$SECONDS; say() { echo "[$((SECONDS - T0)) s] $*"; }
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=200
bash $V/unpack.sh $V & U=$!
mkdir -p /tmp/site /tmp/had; tar -C /tmp/had -xJf $R/.gpu/had2/tree.tarx; tar -C /tmp -xJf $F/mini.tarx; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site /tmp/mini/*.whl 2>&1 | grep -v WARN
wait $U; say unpacked
( export PYTHONPATH=/tmp/vllm-site:$R VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false VLLM_CACHE_ROOT=/tmp/vllm-cache OMP_NUM_THREADS=2
  timeout -s INT -k 5 290 python3 $F/gate.py --out $OUT/three.json --together 3 --limit 280 --impls vllm:int4 lowbit:w4a16_g128 vllm:bf16 > $OUT/three.txt 2> $OUT/three.log; say "vllm: rc $?" ) & VL=$!
export OMP_NUM_THREADS=1
T="timeout -s INT -k 5 60 python3 -m pytest -m gpu -p no:cacheprovider --tb=short -rf -q"
( PYTHONPATH=$R:/tmp/site $T -n 4 --dist worksteal tests/ops/test_fragment_gemm.py tests/ops/test_wide_gemm.py tests/ops/test_byte_gemm.py -k "bf16 or fast_sums" > $OUT/tests.log 2>&1; say "tests rc $?" ) & TS=$!
( cd /tmp/had; PYTHONPATH=/tmp/had:/tmp/site $T -n 6 --dist worksteal tests/kernels/elementwise/test_rotate.py tests/nn/test_rotated_inputs.py > $OUT/had.log 2>&1; say "had rc $?" ) & TH=$!
wait $TS $TH; for f in tests had; do echo == $f; grep -hE "^FAILED|^E  |passed|failed" $OUT/$f.log | cut -c1-170 | tail -9; done
export PYTHONPATH=$R:/tmp/site
CARRY=$P PART="ring" LIMIT=60 bash $P/run.sh > $OUT/ring.txt 2>&1; say ring
CARRY=$P PART="invariant" LIMIT=75 bash $P/run.sh > $OUT/invariant.txt 2>&1; say invariant
for i in $(seq 40); do [ $(ls /tmp/started-* 2>/dev/null | wc -l) = 1 ] && break; sleep 1; done
touch /tmp/go; wait $VL; cut -c1-110 $OUT/three.txt
tail -c 1500 $OUT/ring.txt; tail -c 2300 $OUT/invariant.txt
CARRY=$P PART="pieces" LIMIT=45 bash $P/run.sh > $OUT/pieces.txt 2>&1; say pieces; tail -c 1600 $OUT/pieces.txt
CARRY=$P PART="streamk" LIMIT=60 bash $P/run.sh > $OUT/streamk.txt 2>&1; say streamk; tail -c 1900 $OUT/streamk.txt
( cd /tmp/had; PYTHONPATH=/tmp/had:/tmp/site timeout 30 python3 $R/.gpu/had2/times.py int8 > $OUT/times.txt 2>&1 ); say times; head -12 $OUT/times.txt
cd $OUT; tail -c 200000 three.log > o; mv o three.log; cd $R
timeout -s INT -k 5 70 python3 $R/.gpu/n/rivals.py > $OUT/rivals.log 2>&1; say rivals; tail -3 $OUT/rivals.log | cut -c1-200
