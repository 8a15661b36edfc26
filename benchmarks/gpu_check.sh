#!/usr/bin/env bash
# All GPU tests, in at most six minutes, then the headline figures: benchmarks/gpu_check.sh [DIR for logs and CSV]
#
# PYTHON names the interpreter (default: python3). Of the dev extra only pytest is needed; with pytest-xdist it spreads the
# tests, without it one process runs each file, and the longest files in parts.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-build/gpu_check}
mkdir -p "$out" && rm -f "$out"/*.log
limit=${LIMIT:-360}

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: torch sees no GPU here" >&2
    exit 2
fi
has pytest || { echo "gpu_check: pytest is not installed; add it to PYTHONPATH or install the dev extra" >&2; exit 2; }

# `timeout` in pyproject.toml is an option of pytest-timeout; without it pytest warns, and warnings are errors.
options=(-q -p no:cacheprovider -p no:benchmark -W ignore::pytest.PytestConfigWarning)
names=() pids=()
start() { # NAME ARGUMENTS...
    names+=("$1")
    timeout "$limit" "$python" -m pytest "${options[@]}" "${@:2}" >"$out/$1.log" 2>&1 &
    pids+=($!)
}

SECONDS=0
if has xdist; then
    start all -n 12 --dist worksteal tests/gpu
else
    for file in tests/gpu/test_*.py; do
        name=$(basename "$file" .py)
        case $name in
            test_ops_triton) first="dense" second="fused" ;;
            test_text_length) first="graphed_steps" second="error_is" ;;
            test_training) first="every_way" second="probed_micro" ;;
            *) start "$name" "$file"; continue ;;
        esac
        start "$name-1" "$file" -k "$first"
        start "$name-2" "$file" -k "$second and not $first"
        start "$name-3" "$file" -k "not $first and not $second"
    done
fi
failed=0
for number in "${!names[@]}"; do
    log="$out/${names[$number]}.log"
    if wait "${pids[$number]}"; then
        verdict=ok
    else
        code=$? verdict="FAILED"
        [ "$code" = 124 ] && verdict="FAILED, not done after $limit s"
        failed=$((failed + 1))
        tail -n 60 "$log"
    fi
    printf '%-28s %-8s %s\n' "${names[$number]}" "$verdict" "$(tail -n 1 "$log")"
done
echo "GPU tests: ${#names[@]} processes, $failed failed, $SECONDS s"

echo "The loss beside open_clip's, every batch:"
"$python" benchmarks/bench_loss.py --requirements || failed=$((failed + 1))
echo "A training step beside open_clip's:"
rm -f "$out/step.csv"
"$python" benchmarks/bench_step.py --case ViT-B-32 ViT-B-16 --provider leanclip "open_clip compiled" \
    --output "$out/step.csv" || failed=$((failed + 1))
exit $((failed > 0))
