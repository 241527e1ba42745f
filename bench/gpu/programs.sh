# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it.
: "${build:?set to a build tree before}"

# Prints where a program lies in a build tree, or in a folder with its programs.
find_program() {
  for folder in "$build" "$build/bin" "$build/tests"; do
    [ -x "$folder/$1" ] && echo "$folder/$1" && return
  done
  echo "missing-$1"
}
