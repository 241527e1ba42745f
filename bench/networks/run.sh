#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The libfabric network beside bare libfabric: an 8-byte put and 4 MiB bandwidth over tcp, and over shm. Four cores,
# no GPU. Prints a table, writes OUT/libfabric.json (rows of bench/schema.json).
#   bench/networks/run.sh BUILD [OUT]       BUILD: a build tree, or a folder with marrow_libfabric_put
set -u
build=${1:?usage: bench/networks/run.sh BUILD [OUT]}
out=${2:-network-results}
mkdir -p "$out"
for program in "$build/bin/marrow_libfabric_put" "$build/marrow_libfabric_put"; do
  [ -x "$program" ] && break
done
if [ ! -x "$program" ]; then
  echo "no marrow_libfabric_put in $build. Next: cmake --build BUILD --target marrow_libfabric_put" >&2
  exit 2
fi
# Four cores that we may use; hyperthreads of one core are far apart in number on most machines.
mapfile -t cores < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
pinned=()
if [ "${#cores[@]}" -ge 4 ]; then
  pinned=(--cores "${cores[0]},${cores[1]},${cores[2]},${cores[3]}")
else
  echo "only ${#cores[@]} cores: not pinned, no ratio below counts"
fi
echo "$(uname -sr), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), ${#cores[@]} cores"
failed=0
for provider in tcp shm; do
  timeout 60 "$program" --provider "$provider" "${pinned[@]}" --rounds "${ROUNDS:-3}" --samples "${SAMPLES:-20000}" \
    --json "$out/libfabric-$provider.json" || failed=1
done
exit $failed
