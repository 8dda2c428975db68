export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 COLUMNS=200
R=$PWD; mkdir -p $OUT; OUT=$(realpath $OUT)
[ -d /tmp/site ] || { tar -C /tmp -xJf .gpu/f/mini.tarx && python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site /tmp/mini/*.whl 2>&1 | grep -v WARN; }
export PYTHONPATH=$R:/tmp/site
run() { local l=$1 n=$2; shift 2; local s=$(date +%s); timeout -s INT -k 5 $l "$@" > $OUT/$n.log 2>&1; echo "== $n rc $? $(( $(date +%s) - s )) s"; }
