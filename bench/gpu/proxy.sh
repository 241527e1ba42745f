#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What the proxy path costs on this machine's first GPU, beside a bare ring of the same run: prints the figures that
# have a limit, writes OUT/proxy.json (bench/schema.json). Needs 16 CPU cores for eight progress threads.
#   bench/gpu/proxy.sh BUILD [OUT]     BUILD: a build tree with marrow_proxy_bench, or a folder with it
#   ONLY=rates                         a part of it: bare, rates, latencies, shm, mscclpp
#   REPEAT=1                           how often all of it is taken; the table has the median
#   COMMIT=...                         what the figures are of; default: git's
set -u
build=${1:?usage: bench/gpu/proxy.sh BUILD [OUT]}
out=${2:-gpu-results}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(find_program marrow_proxy_bench)
if [ ! -x "$program" ]; then
  echo "no marrow_proxy_bench in $build. Next: cmake --build $build --target marrow_proxy_bench" >&2
  exit 2
fi
export LD_LIBRARY_PATH=$build:$build/src${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export MARROW_WAIT_TIMEOUT=${MARROW_WAIT_TIMEOUT:-10s}
failed=0
for ((i = 1; i <= ${REPEAT:-1}; ++i)); do
  timeout 120 "$program" --json "$out/proxy-rows-$i.json" ${ONLY:+--only "$ONLY"} > "$out/proxy-$i.log" 2>&1
  status=$?
  [ $status = 77 ] && echo "skipped: no GPU" && exit 77
  if [ $status != 0 ]; then
    echo "FAIL  marrow_proxy_bench (status $status)"
    tail -25 "$out/proxy-$i.log"
    failed=1
  fi
done
grep -h "^skipped" "$out"/proxy-*.log | sort -u
python3 "$here/proxy.py" "$out" || failed=1
exit $failed
