# call 1 of the next session: carry .gpu/w .gpu/next ; tests that never ran, packing, 70B, rivals (issues 15, 16)
. bench/experiments/next/begin.sh; mkdir -p $OUT
P="python3 -m pytest -m gpu -p no:cacheprovider --tb=short -rf"
( run 250 tests $P -v -n 12 --dist worksteal tests/ops/test_chained_gemm.py -k every_tile ) & A=$!
( run 250 other $P -v -n 3 tests/engine/test_gpu.py::test_the_model_computes_as_before tests/ops/test_interleaved_gemm.py "tests/ops/test_byte_gemm.py" -k "computes_as_before or interleaved or plain_kernel or fast_sums" tests/bench/test_tune.py tests/bench/mechanisms/test_kernels.py ) & B=$!
( export PYTORCH_NO_CUDA_MEMORY_CACHING=1; run 200 sanitize compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -m gpu -p no:cacheprovider -v --tb=short tests/ops/test_chained_gemm.py::test_residual_on_a_gpu ) & S=$!
wait $A $B $S
grep -hE "FAILED|^E  |passed|failed" $OUT/tests.log $OUT/other.log $OUT/sanitize.log | cut -c1-180
run 30 pack $P -q -s tests/ops/test_fragment_gemm.py::test_packing_on_the_gpu_is_fast; tail -3 $OUT/pack.log | cut -c1-200
run 110 seventy python3 bench/experiments/next/seventy.py; tail -8 $OUT/seventy.log | cut -c1-330
run 60 rivals python3 bench/experiments/next/rivals.py; tail -4 $OUT/rivals.log
cd $OUT; tar -cJf logs.tar.xz *.log; rm -f *.log; ls
