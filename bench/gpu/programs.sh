# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it.
: "${build:?set to a build tree before}" "${out:?set to a folder for results before}"
mkdir -p "$out"
export LD_LIBRARY_PATH=$build:$build/src${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export MARROW_WAIT_TIMEOUT=${MARROW_WAIT_TIMEOUT:-10s}

# Prints where a program lies in a build tree, or in a folder with its programs.
find_program() {
  for folder in "$build" "$build/bin" "$build/tests"; do
    [ -x "$folder/$1" ] && echo "$folder/$1" && return
  done
  echo "missing-$1"
}

# Prints where it lies; without it the script ends, saying how to build it: program=$(need_program NAME) || exit
need_program() {
  local found
  found=$(find_program "$1")
  [ -x "$found" ] && echo "$found" && return
  echo "no $1 in $build. Next: cmake --build $build --target $1" >&2
  return 2
}

# step LIMIT PROGRAM ARGS...: prints what $step_shows matches of what a program says that succeeds, and the end of what
# one says that fails, with what $step_failures matches before it; then failed=1.
step() {
  local limit=$1 log="$out/step.log" status=0; shift
  timeout "$limit" "$@" > "$log" 2>&1 || status=$?
  case $status in
    0)
      echo "ok    $(basename "$1") ${*:2}" | cut -c1-150
      grep -E "${step_shows:-passed}" "$log" | tail -20 ;;
    77) echo "skip  $(basename "$1") ${*:2}" ;;
    *)
      echo "FAIL  $(basename "$1") ${*:2} (status $status)"
      [ -n "${step_failures:-}" ] && grep -A7 "$step_failures" "$log" | cut -c1-250 | head -70
      tail -25 "$log" | cut -c1-200
      # shellcheck disable=SC2034  # the script's own
      failed=1 ;;
  esac
}
