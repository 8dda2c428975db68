# carry .gpu/vllm .gpu/f .gpu/n1 (with tree.tarx, tree-streamk.tarx of prod); about 580 s, each part alone on the GPU but the tests
bash .gpu/vllm/unpack.sh .gpu/vllm & U=$!
. .gpu/n1/begin.sh
wait $U; C=$R/.gpu/n1; VP=/tmp/vllm-site:$R:/tmp/site
export VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false
run 185 left python3 -m pytest -m gpu -p no:cacheprovider --tb=short -rf -v -n 15 --dist worksteal @$C/left.txt
grep -hE "^FAILED|^E  |(passed|failed).* in " $OUT/left.log | cut -c1-170 | tail -9; pkill -9 -f pytest; sleep 1
PYTHONPATH=$VP run 100 load python3 $C/load.py; cut -c1-200 $OUT/load.log | tail -9; pkill -9 -f load.py; rm -rf /tmp/gptq8b
PYTHONPATH=$VP run 45 fa3 python3 $C/fa3.py; cut -c1-260 $OUT/fa3.log | tail -6
PYTHONPATH=$VP run 90 marlin python3 $C/marlin.py; cut -c1-330 $OUT/marlin.log | tail -22
CARRY=$C PART="pieces streamk" LIMIT=95 bash $C/products.sh > $OUT/products.txt 2>&1; tail -c 4500 $OUT/products.txt; pkill -9 -f cases.py
cd $OUT; tar -cJf logs.tar.xz *.log *.txt; rm -f *.log *.txt
