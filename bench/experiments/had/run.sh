#!/bin/bash
# Rotations in the quantizer: correctness first (tests in parallel, since compiling is most of it), then times. About 50 s.
# Run from the repository's root:  bash .gpu/had/run.sh
export OMP_NUM_THREADS=2 PYTHONPATH=$PWD
OUT=${OUT:-/tmp/had}; mkdir -p "$OUT"
T=tests/kernels/elementwise/test_rotate.py
py() { timeout 45 python -m pytest -q -x -p no:cacheprovider "$@" 2>&1; }
py $T -m gpu -k "butterflies or operators" > $OUT/1.txt &
py $T -m gpu -k "codes_of and int8" > $OUT/2.txt &
py $T -m gpu -k "codes_of and fp8" > $OUT/3.txt &
py $T -m gpu -k "norms_and_gates and int8" > $OUT/4.txt &
py $T -m gpu -k "norms_and_gates and fp8" > $OUT/5.txt &
py tests/nn/test_rotated_inputs.py -m gpu -k "not w8e4m3" > $OUT/6.txt &
py tests/nn/test_rotated_inputs.py -m gpu -k "w8e4m3" > $OUT/7.txt &
py tests/kernels/elementwise/test_quantize_rows.py -m gpu -k "fused or halves or graph or finite" > $OUT/8.txt &
wait
for i in 1 2 3 4 5 6 7 8; do echo "== $i"; tail -n 25 $OUT/$i.txt | cut -c1-300; done
timeout 40 python .gpu/had/times.py int8 | tee $OUT/times-int8.txt
