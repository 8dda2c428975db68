export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 COLUMNS=200
R=$PWD; G=$PWD/.gpu; C=$G/a
if [ ! -d /tmp/site ]; then tar -C /tmp -xJf $G/w/whl.tarx && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site /tmp/whl/*.whl 2>&1 | grep -v WARN; fi
export PYTHONPATH=$R:/tmp/site
run() { local l=$1 n=$2; shift 2; local s=$(date +%s); timeout -s INT -k 5 $l "$@" > $OUT/$n.log 2>&1; echo "== $n rc $? $(( $(date +%s) - s )) s"; }
