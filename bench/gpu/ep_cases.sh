#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The cases of tests/ep on GPUs: every path in a process of its own, since a kernel that crashes takes its process's context
# along; first a rank a GPU, then two, which has teams and mixed paths. Prints what fails and a line for each process.
#   bench/gpu/ep_cases.sh BUILD [OUT]     BUILD: a build tree, or a folder with its programs
#   RANKS="1 2"      ranks a GPU
#   FILTER=Case06*   of the cases; default: all
#   LIMIT=60         seconds a process
#   MEMCHECK=FILTER  these under compute-sanitizer memcheck, too (a rank a GPU); NAMES="lsa gda" paths of them
#   FAILURES=FILTER  of the cases of ep_failure_gpu: a rank, a process each, is killed and replaced
set -u
build=${1:?usage: bench/gpu/ep_cases.sh BUILD [OUT]}
out=${2:-ep-cases}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(find_program ep_cases_gpu)
export LD_LIBRARY_PATH=$build:$build/src:${LD_LIBRARY_PATH:-}
for file in "$here/routing.jsonl" "$here/../../tests/ep/routing.jsonl"; do
  [ -f "$file" ] && export MARROW_TEST_EP_ROUTING=$file
done
failed=0
# run NAME LIMIT COMMAND...: the output to OUT/NAME.txt, its last words here.
run() {
  local name=$1 limit=$2 log=$out/$1.txt start=$SECONDS code=0
  shift 2
  timeout "$limit" "$@" >"$log" 2>&1 || code=$?
  printf '%-24s exit %-3d %3d s  %s passed, %s skipped, %s failed\n' "$name" "$code" $((SECONDS - start)) \
    "$(grep -c '^\[       OK' "$log")" "$(grep -c '^\[  SKIPPED \].*ms)' "$log")" "$(grep -c '^\[  FAILED  \].*ms)' "$log")"
  [ $code = 0 ] && grep -q '^\[       OK' "$log" && return
  failed=1
  grep -E '^\[  FAILED|rank |threw|crashed|Invalid|ERROR SUMMARY|WARN' "$log" | cut -c1-200 | head -20
  [ $code = 124 ] && tail -2 "$log"
}
for ranks in ${RANKS-1 2}; do
  paths="lsa gda proxy alone"
  [ "$ranks" -gt 1 ] && paths="$paths mixed teams"
  for path in $paths; do
    MARROW_TEST_EP_RANKS=$ranks run "$path-$ranks" "${LIMIT:-60}" "$program" "--gtest_filter=*${FILTER:-}*/$path"
  done
done
if [ -n "${MEMCHECK:-}" ]; then
  # What runs already when memory is allocated does not know of it for memcheck: so softnic's engine is left out. Calls that fail
  # are probes.
  skip=$(compute-sanitizer --help 2>&1 | grep -o -m1 -E -e '--(kernel-regex-|kernel-name-)?exclude' | head -1)
  exclude=()
  [ -n "$skip" ] && exclude=("$skip" kns=engine_block)
  for path in ${NAMES:-lsa gda proxy}; do
    run "memcheck-$path" "${LIMIT:-60}" compute-sanitizer --error-exitcode 9 --report-api-errors no "${exclude[@]}" \
      "$program" "--gtest_filter=$MEMCHECK/$path"
  done
fi
if [ -n "${FAILURES:-}" ]; then
  run failures "${LIMIT:-60}" "$(find_program ep_failure_gpu)" "--gtest_filter=$FAILURES"
fi
exit $failed
