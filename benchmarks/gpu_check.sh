#!/usr/bin/env bash
# What only a GPU can tell, in under six minutes and without network: builds, checks, measures. From the repository root:
#
#     benchmarks/gpu_check.sh          PYTHON names the interpreter (python3); results also go to the folder $OUT if it is set
#
# Every stage has a limit and runs whatever became of the others. The last lines say how each ended; so does the exit status.
set -u
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
log=${OUT:-$(mktemp -d)}/log.txt
summary=() workers=() failed=0
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=1 # the stages have processes enough

# The smaller of some seconds and of what is left of six minutes.
within() {
    local left=$((355 - SECONDS))
    echo $(($1 < left ? $1 : left))
}

# stage NAME SECONDS LINES COMMAND...: runs a command within a limit and shows its last LINES lines; the log has them all.
stage() {
    local name=$1 limit lines=$3 start=$SECONDS status
    limit=$(within "$2")
    shift 3
    echo "== $name"
    if [ "$limit" -lt 5 ]; then
        status=124
    else
        timeout -s INT -k 5 "$limit" "$@" 2>&1 | tee -a "$log" | tail -n "$lines" | cut -c 1-200
        status=${PIPESTATUS[0]}
    fi
    case $status in
        0) summary+=("right    $name, $((SECONDS - start)) s") ;;
        124 | 137) summary+=("too slow $name, stopped after $((SECONDS - start)) s") ;;
        *) summary+=("FAILED   $name, status $status, $((SECONDS - start)) s") ;;
    esac
    [ "$status" = 0 ] || failed=1
    return "$status"
}

has() { "$python" -c "import $1" 2>/dev/null; }

stage device 60 20 "$python" - <<'EOF'
import shutil, subprocess, sys, torch, triton
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU: nothing can be checked")
gpu = torch.cuda.get_device_properties(0)
print(f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB")
print(f"cuDNN {torch.backends.cudnn.version()}, nvcc at {(nvcc := shutil.which('nvcc'))}")
if nvcc:
    print(subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()[-2])
EOF

if [ $? = 0 ]; then
    stage build 100 5 "$python" setup.py --quiet build_ext --inplace
    stage correctness 110 30 "$python" benchmarks/gpu_correctness.py --seconds 95
    stage norm 50 30 "$python" benchmarks/bench_norm_gpu.py --seconds 35
    stage attention 170 90 "$python" benchmarks/bench_attention_gpu.py --seconds $(($(within 170) - 20))
    if has pytest && has hypothesis; then
        # What gpu_correctness.py leaves out: layouts, properties, the random stream.
        has xdist && workers=(-n "$(nproc)")
        stage tests 90 12 "$python" -m pytest -q --tb=line "${workers[@]}" tests/test_attention.py \
            -k "triton and not test_results_and_gradients and not test_any_combination"
    else
        summary+=("left out tests: pytest or hypothesis is not installed")
    fi
fi

[ -z "${OUT:-}" ] || cp benchmarks/results/*_gpu.csv "$OUT/" 2>/dev/null
printf '%s\n' "== in $SECONDS s" "${summary[@]}"
exit $failed
