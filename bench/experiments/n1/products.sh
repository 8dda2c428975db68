#!/bin/bash
# CARRY: this folder. PART=ring|invariant|pieces|streamk or several: PART="ring invariant pieces streamk"; LIMIT: seconds of each (90).
# tree.tarx is lowbit/ of branch wt-prod, tree-streamk.tarx that of wt-prod-streamk, for PART=streamk.
# Prints what is wrong, what hangs (by name, 10 s a case) and times; full logs in $OUT. The Triton cache is filled by 16 processes first.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
C=$(cd "${CARRY:-$PWD/.gpu/prod}" && pwd)
for part in ${PART:-ring invariant pieces streamk}; do
  tree=tree; [ $part = streamk ] && tree=tree-streamk
  mkdir -p /tmp/prod17/$tree && tar -C /tmp/prod17/$tree -xJf $C/$tree.tarx && cp $C/cases.py /tmp/prod17/$tree/cases.py
  ( cd /tmp/prod17/$tree
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=/tmp/prod17/cache
    timeout -s INT -k 5 ${LIMIT:-90} python3 cases.py $part times 2>&1 | tee ${OUT:-/tmp}/prod-$part.log | tail -c ${TAIL:-2800} )
done
