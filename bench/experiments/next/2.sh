# call 2: mechanisms (sums, lines, counters), tune
. bench/experiments/next/begin.sh; mkdir -p $OUT
run 150 mech python3 -m lowbit bench mechanisms --parts sums,lines --out $OUT/mechanisms.json; tail -60 $OUT/mech.log
run 90 counters python3 -m lowbit bench mechanisms --parts counters --out $OUT/counters.json; tail -20 $OUT/counters.log
python3 - <<'P'
from lowbit.bench import tune
rows = tune.run({"w4a16_g128": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 13824)]}, tune.TOKENS, 120, print, lambda *_: None)
for r in rows: print(r.n, r.k, r.kept)
P
