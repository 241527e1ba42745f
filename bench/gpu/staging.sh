#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# GPU memory that the proxy's network cannot read: put latency by size when the kernel writes it to pinned memory, beside
# the copy engine's, and from which size on which is faster; what MARROW_PROXY_STAGE_KERNEL_BYTES should be here. Prints the
# tables, writes OUT/staging.json (bench/schema.json).
#   bench/gpu/staging.sh BUILD [OUT]     BUILD: a build tree with marrow_proxy_bench, or a folder with it
#   CONFORMANCE=60                       first so many seconds of the contract on such memory, if marrow_conformance_gpu is there
#   COMMIT=...                           what the figures are of; default: git's
set -u
build=${1:?usage: bench/gpu/staging.sh BUILD [OUT]}
out=${2:-gpu-results}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(need_program marrow_proxy_bench) || exit
failed=0
# shellcheck disable=SC2034  # for step
step_failures="^FAIL:"
if [ -n "${CONFORMANCE:-}" ] && [ -x "$(find_program marrow_conformance_gpu)" ]; then
  # As GPU memory would be on a network that cannot reach it, at both switch-overs.
  for bytes in 4K 0; do
    MARROW_PROXY_STAGE=always MARROW_PROXY_STAGE_KERNEL_BYTES=$bytes step $((CONFORMANCE + 30)) \
      "$(find_program marrow_conformance_gpu)" --matrix pairwise --path proxy --network shm --memory device \
      --seconds $((CONFORMANCE / 2)) --totals
  done
fi
timeout 60 "$program" --only staging --json "$out/staging-rows.json" > "$out/staging.log" 2>&1
status=$?
[ $status = 77 ] && echo "skipped: no GPU" && exit 77
if [ $status != 0 ]; then
  echo "FAIL  marrow_proxy_bench --only staging (status $status)"
  tail -25 "$out/staging.log"
  exit 1
fi
python3 "$here/staging.py" "$out" || failed=1
exit $failed
