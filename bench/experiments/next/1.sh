# Call 1 (carry .gpu/f with mini.tarx, this folder as .gpu/next, .gpu/prod): tests that no run has reached (left.txt), times of pieces and of equal shares
. .gpu/next/begin.sh
run 150 left python3 -m pytest -m gpu -p no:cacheprovider --tb=short -rf -v -n 14 --dist worksteal $(sed 's/.*/&/' .gpu/next/left.txt | tr '\n' ' ')
grep -hE "FAILED|^E  |passed|failed" $OUT/left.log | cut -c1-180 | tail -20
CARRY=.gpu/prod PART="pieces" LIMIT=90 bash .gpu/prod/run.sh > $OUT/pieces.txt 2>&1; tail -c 3000 $OUT/pieces.txt
CARRY=.gpu/prod PART="streamk" LIMIT=110 bash .gpu/prod/run.sh > $OUT/streamk.txt 2>&1; tail -c 3500 $OUT/streamk.txt
cd $OUT; tar -cJf logs.tar.xz *.log *.txt; rm -f *.log *.txt
