#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A process is killed (SIGKILL) while its block on the GPU executes gda queues: the other rank must name it within a few
# seconds and end, nothing may be left on the GPU, and the next run must work.
#   bench/gpu/gda_killed.sh BUILD [OUT]    BUILD: a build tree, or a folder with its programs
#   PLACE=cpu                              tries the script itself, without a GPU
set -u
build=${1:?usage: bench/gpu/gda_killed.sh BUILD [OUT]}
out=${2:-gda-killed-results}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
marrow=$(find_program marrow)
MEMORY=$([ -n "${PLACE:-}" ] || echo device)  # windows on the GPU: its block is the NIC
[ -n "${PLACE:-}" ] || [ "$(nvidia-smi -L 2>/dev/null | grep -c GPU)" -ge 1 ] || { echo "skipped: no GPU"; exit 77; }
run() { timeout 40 "$marrow" perf signal --place "${PLACE:-gpu}" --path gda --processes \
  --iterations "$1" ${MEMORY:+--memory "$MEMORY"}; }
failed=0
run 10000000 > "$out/killed.log" 2>&1 &
parent=$!
sleep 6
# A shell, timeout, marrow, and below it the ranks; the last one is not rank 0.
kids=$parent
while [ "$(wc -w <<< "$kids")" = 1 ]; do kids=$(pgrep -P "$kids"); done
victim=$(tail -1 <<< "$kids")
if [ -z "$victim" ]; then
  echo "FAIL  no rank to kill"; tail -5 "$out/killed.log"; exit 1
fi
start=$(date +%s%N)
kill -9 "$victim"
wait "$parent"
status=$?
took=$((($(date +%s%N) - start) / 1000000))
if [ $status != 0 ] && [ $took -lt 10000 ] && grep -qiE "rank 1.*(fail|exit|died|kill|gone|closed)|(fail|lost|closed).*rank 1" "$out/killed.log"; then
  echo "ok    rank 1 killed: named after $took ms, status $status"
else
  echo "FAIL  rank 1 killed: status $status after $took ms"; failed=1
fi
grep -iE "rank 1" "$out/killed.log" | head -3 | cut -c1-200
sleep 1
left=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -c .)
if [ "$left" = 0 ]; then
  echo "ok    nothing left on the GPU"
else
  echo "FAIL  $left processes left on the GPU"; failed=1
fi
if run 2000 > "$out/after.log" 2>&1; then
  echo "ok    the next run: $(tail -1 "$out/after.log" | cut -c1-120)"
else
  echo "FAIL  the next run"; tail -5 "$out/after.log"; failed=1
fi
exit $failed
