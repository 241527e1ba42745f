#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# MoE dispatch and combine: checks against the plain reference, then times with the floors of the same run; OUT/ep.json holds
# all figures. Needs two GPUs.
#   bench/gpu/ep.sh BUILD [OUT]     BUILD: a build tree, or a folder with its programs
#   CHECKS=0                        times only
#   SHAPES=1                        the checks with grids of every shape, too
#   SANITIZE=1                      the checks under compute-sanitizer memcheck, too
set -u
build=${1:?usage: bench/gpu/ep.sh BUILD [OUT]}
out=${2:-ep-results}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(need_program marrow_ep_gpu) || exit
for file in "$here/routing.jsonl" "$here/../../tests/ep/routing.jsonl"; do
  [ -f "$file" ] && export MARROW_TEST_EP_ROUTING=$file
done
failed=0
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -2
if [ "${CHECKS:-1}" != 0 ]; then timeout 150 "$program" check || failed=1; fi
if [ -n "${SHAPES:-}" ]; then timeout 60 "$program" shapes || failed=1; fi
if [ -n "${SANITIZE:-}" ]; then timeout 200 compute-sanitizer --error-exitcode 9 "$program" check | tail -30 || failed=1; fi
if [ $failed = 0 ]; then
  timeout 100 "$program" time --json "$out/rows.json" || failed=1
  python3 "$here/ep.py" "$out" || failed=1
fi
exit $failed
