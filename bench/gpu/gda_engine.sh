#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Checks softnic's GPU engine, then measures it against a bare engine of the same run; the last lines are a table with
# limits, and OUT/gda-engine.json holds all figures (bench/schema.json). Needs two GPUs.
#   bench/gpu/gda_engine.sh BUILD [OUT]    BUILD: a build tree, or a folder with its programs
#   WQES=N MODEL_SECONDS=S                 how long the comparison with the model of the NIC is, posted to by CPUs
#   POSTED=N POSTED_SECONDS=S              ... and posted to by the GPU; 10^8 takes about a minute
#   SECONDS_PER_MATRIX=20                  how long each conformance matrix runs; 0: not at all
#   REPEAT=3                               how often the figures are taken; the table has the median
set -u
build=${1:?usage: bench/gpu/gda_engine.sh BUILD [OUT]}
out=${2:-gda-engine-results}
here=$(cd "$(dirname "$0")" && pwd)
failed=0

# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
step_shows='passed,|WQEs over|PASSED'

bench=$(find_program marrow_gda_engine) conformance=$(find_program marrow_conformance_gpu)
echo "== checks"
step $((${MODEL_SECONDS:-20} + 60)) "$(find_program softnic_engine_test)" --wqes "${WQES:-1000000}" --seconds "${MODEL_SECONDS:-20}"
step $((${POSTED_SECONDS:-20} + 60)) "$(find_program softnic_posted_gpu_test)" --wqes "${POSTED:-5000000}" --seconds "${POSTED_SECONDS:-20}"
limit=${SECONDS_PER_MATRIX:-20}
if [ "$limit" != 0 ]; then
  for as in threads processes; do
    step $((limit + 40)) "$conformance" --matrix pairwise --matrix-seed "${MATRIX_SEED:-1}" --seconds "$limit" --path gda --memory device --as $as
  done
fi
echo "== figures"
for ((i = 1; i <= ${REPEAT:-3}; ++i)); do step 60 "$bench" --json "$out/rows-$i.json"; done
python3 "$here/gda_engine.py" "$out" || failed=1
exit $failed
