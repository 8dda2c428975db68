#!/bin/bash
# CARRY: this folder; tree.tarx is lowbit/ and bench/ of branch wt-prod-kernels. First of all names of cases that hang, 10 s each.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
C=${CARRY:-$PWD/.gpu/prod}
rm -rf /tmp/prod; mkdir -p /tmp/prod && tar -C /tmp/prod -xJf $C/tree.tarx
cd /tmp/prod
export PYTHONPATH=/tmp/prod${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/prod-cache
timeout -s INT -k 5 ${LIMIT:-240} python3 bench/kernel_cases.py "$@" 2>&1 | tee ${OUT:-/tmp}/prod.log | tail -c 11000
