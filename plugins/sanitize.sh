#!/usr/bin/env bash
# Runs compute-sanitizer's memcheck, synccheck and racecheck over every kernel of the library that this GPU has, and
# the reduced programs of harness/ under the tool that each names; writes what they say as Markdown.
#
#   make kernels && plugins/sanitize.sh benchmarks/results/sanitizers-h200.md [LOGS]
#
# Ends with 1 if a kernel was left out, a tool did not come to an end, or a report is not explained by a reduced program
# (harness/sanitizer_summary.py says when it is). LOGS is where the tools' own words are kept. PYTHON, COMPUTE_SANITIZER
# and NVCC name others than those on the path, TRTLLM_DFLASH_KERNELS another library than plugins/build's. A tool is
# ended after LIMIT seconds, for kernels may wait for ever.
set -euo pipefail

summary=${1:?where to write the summary: plugins/sanitize.sh SUMMARY.md [LOGS]}
logs=${2:-$(mktemp -d)}
plugins=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
nvcc=${NVCC:-nvcc}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
limit=${LIMIT:-300}

mkdir -p "$logs"
export NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS=100000 # or a report may say that they were too many
export PYTHONPATH="$plugins/..${PYTHONPATH:+:$PYTHONPATH}"
programs=$("$python" "$plugins/harness/sanitizer_summary.py" --list) # one whose first line is wrong ends this at once
for command in "$nvcc" "$sanitizer" nm c++filt nvidia-smi; do
    command -v "$command" > /dev/null || { echo "error: $command is not installed" >&2; exit 1; }
done
gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader | head -n 1)
echo "$("$sanitizer" --version | sed -n 's/^Version \([0-9.]*\).*/compute-sanitizer \1/p'), one ${gpu%, *}." \
    > "$logs/machine.txt"

# On Hopper, attention as other GPUs have it lies in a library without Hopper's own: its code is compiled for 90a alone.
arguments=()
target=(-arch=native)
if [ "${gpu##*, }" = 9.0 ]; then
    target=(-gencode arch=compute_90a,code=sm_90a) # that alone: -arch=sm_90a can add code without Hopper's own
    arguments=(--without-hopper "$logs/without_hopper.so")
fi

compile_all()
{
    local compiling=() each
    if [ ${#arguments[@]} -gt 0 ]; then
        "$nvcc" -arch=sm_90 --split-compile=0 -O3 -DNDEBUG -std=c++17 -lineinfo -shared -Xcompiler=-fPIC \
            "-I$plugins/include" -DDFLASH_ARCHITECTURES=\"90-real\" -o "$logs/without_hopper.so" \
            "$plugins/src/attention.cu" "$plugins/src/library.cpp" &
        compiling+=($!)
    fi
    while read -r each _; do
        if [ -n "$each" ]; then
            "$nvcc" "${target[@]}" -O3 -std=c++17 -lineinfo "-I$plugins/include" "-I$plugins/src" -o "$logs/$each" \
                "$plugins/harness/$each.cu" &
            compiling+=($!)
        fi
    done <<< "$programs"
    for each in "${compiling[@]}"; do
        wait "$each" || return 1
    done
}

# sanitize TOOL NAME COMMAND...: its reports in NAME.log, the command's output in NAME.out. Reports end nothing here.
sanitize()
{
    local tool=$1 name=$2
    shift 2
    local options=(--tool "$tool" --print-limit 10000 --error-exitcode 99 --target-processes all
        --show-backtrace device --destroy-on-device-error kernel --log-file "$logs/$name.log")
    if [ "$tool" = memcheck ]; then
        # torch asks the driver what may fail; what our calls return is looked at where they are made.
        options+=(--report-api-errors no)
    fi
    timeout --kill-after=10 "$limit" "$sanitizer" "${options[@]}" "$@" > "$logs/$name.out" 2>&1 || true
}

# run TOOL NAME ARGUMENTS...: a tool over the kernels that the arguments name, and how long it took.
run()
{
    local tool=$1 name=$2 begun=$SECONDS
    shift 2
    # Each tensor is an allocation of its own, so that an access past its end is seen. Only our kernels are looked at.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize "$tool" "$name" --kernel-name kns=dflash \
        "$python" "$plugins/harness/every_kernel.py" "$@"
    echo "$((SECONDS - begun))" > "$logs/$name.seconds"
    echo "$name: $((SECONDS - begun)) s, $(grep 'SUMMARY' "$logs/$name.log" | head -n 1)" >&2
}

# The profiler counts what ran; tools would hide from it.
cover()
{
    timeout --kill-after=10 "$limit" "$python" "$plugins/harness/every_kernel.py" --cover "${arguments[@]}" \
        > "$logs/cover.out" || touch "$logs/left_out"
    tail -n 1 "$logs/cover.out" > "$logs/kernels.txt"
}

rm -f "$logs/left_out"
groups=$("$python" "$plugins/harness/every_kernel.py" --list)
compile_all &
compiler=$!
# racecheck is slow where blocks have much shared memory: a process for each group of kernels. All run side by side;
# those that need what is being compiled begin last.
for group in $groups; do
    run racecheck "racecheck-$group" --group "$group" &
done
wait "$compiler" || { echo "error: not all programs were compiled" >&2; wait; exit 1; }
if [ ${#arguments[@]} -gt 0 ]; then
    TRTLLM_DFLASH_KERNELS=$logs/without_hopper.so run racecheck racecheck-without-hopper --group attention &
fi
run memcheck memcheck "${arguments[@]}" &
run synccheck synccheck "${arguments[@]}" &
cover &
while read -r name tool; do
    if [ -n "$name" ]; then
        timeout --kill-after=10 "$limit" "$logs/$name" > "$logs/$name.out" || {
            echo "error: $name, which has no fault, did not end with 0" >&2; wait; exit 1; }
        sanitize "$tool" "$name" "$logs/$name"
    fi
done <<< "$programs"
wait

echo "logs: $logs" >&2
"$python" "$plugins/harness/sanitizer_summary.py" "$logs" | tee "$summary"
if [ -e "$logs/left_out" ]; then
    cat "$logs/cover.out" >&2
    echo "error: a kernel was left out" >&2
    exit 1
fi
