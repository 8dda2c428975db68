#!/bin/bash
# unpack.sh CARRY: vLLM 0.25.1 for CUDA 13, sm_90 cubins only, and what it imports, into /tmp/vllm-site. About 6 s.
C=$1 S=/tmp/vllm-site
[ -e $S/.done ] && exit 0
rm -rf $S; mkdir -p $S/vllm/vllm_flash_attn
tar xJf $C/py.tar.xz -C $S & P1=$!
tar xJf $C/deps.tar.xz -C $S & P2=$!
xz -dc $C/_C_stable_libtorch.abi3.so.xz > $S/vllm/_C_stable_libtorch.abi3.so & P3=$!
xz -dc $C/_moe_C_stable_libtorch.abi3.so.xz > $S/vllm/_moe_C_stable_libtorch.abi3.so & P4=$!
xz -dc $C/_vllm_fa3_C.abi3.so.xz > $S/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so & P5=$!
for p in $P1 $P2 $P3 $P4 $P5; do wait $p || { echo "unpack failed"; exit 1; }; done
(cd $S && python3 -m compileall -q -j 14 vllm openai anthropic mcp pydantic > /dev/null 2>&1)
touch $S/.done
