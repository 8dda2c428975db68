#!/bin/bash
# CARRY: this folder. OUT: where files go.
export OUT=${OUT:-/tmp/sm80out}; mkdir -p $OUT
C=${CARRY:-$PWD/.gpu/sm80}; C=$(cd $C && pwd)
rm -rf /tmp/sm80; mkdir -p /tmp/sm80 && tar -C /tmp/sm80 -xJf $C/tree.tarx
if [ ! -d /tmp/site ] && [ -f $C/../w/whl.tarx ]; then tar -C /tmp -xJf $C/../w/whl.tarx && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site /tmp/whl/*.whl 2>&1 | grep -v WARN; fi
cd /tmp/sm80
export PYTHONPATH=/tmp/sm80:/tmp/site${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/sm80-cache OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
python3 $C/bench.py make || exit 1
rm -f $OUT/tests_done
(
  timeout 110 python3 -m pytest -x -q -p no:cacheprovider tests/ops/test_wide_gemm.py -k "in_turn or graphs or do_not_split" > $OUT/t1 2>&1 &
  timeout 110 python3 -m pytest -x -q -p no:cacheprovider tests/ops/test_wide_gemm.py -k "gated and silu" > $OUT/t2 2>&1 &
  timeout 110 python3 -m pytest -x -q -p no:cacheprovider tests/ops/test_byte_gemm.py -k "plain_kernel" > $OUT/t3 2>&1 &
  wait; touch $OUT/tests_done
) &
timeout 400 python3 $C/bench.py run 2> $OUT/err | tee $OUT/sm80.log | tail -c 11000
for t in t1 t2 t3; do grep -aE "passed|failed|^E |Error" $OUT/$t | tail -4; done
tail -c 400 $OUT/err
