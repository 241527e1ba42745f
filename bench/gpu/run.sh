#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Checks, then measures, on a machine with 2 or more GPUs; the last lines are a table against the floor kernels of
# the same run, and OUT/lsa.json holds all figures (bench/schema.json).
#   bench/gpu/run.sh BUILD [OUT]       BUILD: a build tree, or a folder with its programs
#   SECONDS_PER_MATRIX=240 QUICK=1     how long each conformance matrix runs; QUICK skips them
#   NO_FIGURES=1                       checks only
#   REPEAT=3                           how often the figures that have a limit are taken; the table has the median
# Every kernel has a deadline of its own and every program a time limit here.
set -u
build=${1:?usage: bench/gpu/run.sh BUILD [OUT]}
out=${2:-gpu-results}
here=$(cd "$(dirname "$0")" && pwd)
failed=0

# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
step_shows='[0-9] passed,|torn|not started' step_failures='^FAIL:'

marrow=$(find_program marrow) floor=$(find_program marrow_floor) conformance=$(find_program marrow_conformance_gpu)
gpus=$(nvidia-smi -L | wc -l)
echo "== $gpus GPUs, $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1)"

echo "== checks"
step 120 "$(find_program memory_test)"
step 40 "$(find_program groups_test)"
step 60 "$(find_program launch_test)"
step 110 "$(find_program cells_litmus_test)" "${LITMUS_SECONDS:-1.5}" --json "$out/cells.json"
if [ -z "${QUICK:-}" ]; then
  # Every pair of values for each path, ranks as threads (several a GPU where there are more than GPUs) and as
  # processes, in every memory that the path reaches; then more ranks a GPU.
  limit=${SECONDS_PER_MATRIX:-240}
  step $((limit + 60)) "$conformance" --matrix pairwise --each path --matrix-seed "${MATRIX_SEED:-1}" \
    --seconds "$limit" --gpus "$gpus" --verbose --totals --json "$out/conformance-pairs.json"
  cp "$out/step.log" "$out/conformance-pairs.log"
  step $((limit + 60)) "$conformance" --matrix pairwise --matrix-seed "${MATRIX_SEED:-1}" --ranks 4,8 --as threads \
    --seconds "$limit" --gpus "$gpus" --verbose --totals --json "$out/conformance-ranks.json"
  cp "$out/step.log" "$out/conformance-ranks.log"
  # A slot used a thousand times; an exact sum over three paths.
  for path in lsa gda proxy; do
    step 100 "$conformance" --case put_signal --path "$path" --memory host --iterations 1000 --delay 20
  done
  step 100 "$conformance" --case exact_sum --path mixed --memory host --ranks 4 --count 200000 --sharing block
  step 60 "$marrow" demo --place gpu --ranks $((2 * gpus))
fi
[ -n "${NO_FIGURES:-}" ] && exit $failed

echo "== figures"
perf() { step 60 "$marrow" perf "$1" --place gpu "${@:3}" --json "$out/perf-$2.json"; }
for ((i = 1; i <= ${REPEAT:-3}; ++i)); do
  step 60 "$floor" --json "$out/floor-$i.json"
  # Small and large apart: where in memory a word lies changes its latency by 0.1 us.
  perf floor floor-$i --path lsa
  perf put put-$i --path lsa --sizes 8,1K,64K
  perf put put-large-$i --path lsa --sizes 1M,64M
  perf put put-processes-$i --path lsa --processes --sizes 8,1K
  perf put put-large-processes-$i --path lsa --processes --sizes 64M
  perf packet packet-$i --path lsa --sizes 8,1K,8K
  perf alltoall alltoall-$i --path lsa --sizes 4K,64K,256K,1M,4M,16M,64M
done
perf put_value put_value --path lsa
perf signal signal --path lsa
perf get get --path lsa --sizes 8,1K,64M
perf barrier barrier --path lsa
perf put gda --path gda --sizes 8,4K
perf put proxy --path proxy --sizes 8,4K
[ "$gpus" -ge 4 ] && perf alltoall alltoall-4-ranks --path lsa --ranks 4 --sizes 64K,1M,64M
python3 "$here/report.py" "$out" || failed=1
[ $failed = 0 ] && echo "all checks passed" || echo "SOMETHING FAILED"
exit $failed
