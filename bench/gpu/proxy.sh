#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What the proxy path costs on this machine's first GPU, beside a bare ring of the same run: prints the figures that
# have a limit, writes OUT/proxy.json (bench/schema.json). Needs 16 CPU cores for eight progress threads.
#   bench/gpu/proxy.sh BUILD [OUT]     BUILD: a build tree with marrow_proxy_bench, or a folder with it
#   ONLY=rates,latencies               parts of it: bare, rates, latencies, shm, mscclpp; repeats leave shm out
#   REPEAT=3                           how often all of it is taken; the table has each
#   PLACEMENT=1                        first, why rates differ: the same rate on other CPUs, with what each CPU did at the time
#   COMMIT=...                         what the figures are of; default: git's
set -u
build=${1:?usage: bench/gpu/proxy.sh BUILD [OUT]}
out=${2:-gpu-results}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(need_program marrow_proxy_bench) || exit
failed=0
if [ -n "${PLACEMENT:-}" ]; then timeout 120 "$program" --only placement | tee "$out/placement.txt" || failed=1; fi
for ((i = 1; i <= ${REPEAT:-3}; ++i)); do
  only=${ONLY:-}
  [ -z "$only" ] && [ "$i" != 1 ] && only=bare,rates,latencies,mscclpp
  timeout 120 "$program" --json "$out/proxy-rows-$i.json" ${only:+--only "$only"} > "$out/proxy-$i.log" 2>&1
  status=$?
  [ $status = 77 ] && echo "skipped: no GPU" && exit 77
  if [ $status != 0 ]; then
    echo "FAIL  marrow_proxy_bench (status $status)"
    tail -25 "$out/proxy-$i.log"
    failed=1
  fi
done
grep -h "^GPU 0 at" "$out"/proxy-*.log | sort -u
grep -h "^skipped" "$out"/proxy-*.log | sort -u
python3 "$here/proxy.py" "$out" || failed=1
exit $failed
