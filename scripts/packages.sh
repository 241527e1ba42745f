# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by ./demo and ./test: finds out what is missing and installs it, or prints the one command to run.
# A machine that cannot reach a registry must hear so within seconds, so a 5 s probe comes before apt-get.

# need_packages PURPOSE PACKAGE...: nothing to do without packages. Returns after installing them; exits 2
# with the one command otherwise.
need_packages() {
  local purpose=$1
  shift
  [ $# -eq 0 ] && return 0
  echo "$purpose needs packages that are missing here: $*" >&2
  if can_install; then
    echo "Installing them with apt-get ..." >&2
    if as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 update </dev/null >&2 &&
      as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" </dev/null >&2; then
      hash -r
      return 0
    fi
    echo "apt-get could not install them." >&2
  fi
  echo "Run this one command, then $purpose again:" >&2
  echo "  $(install_command "$@")" >&2
  exit 2
}

# want_packages PURPOSE PACKAGE...: the same, but who needs them can do without: says so and returns 1.
want_packages() {
  local purpose=$1
  shift
  [ $# -eq 0 ] && return 0
  if can_install; then
    echo "Installing $* for $purpose ..." >&2
    if as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 update </dev/null >&2 &&
      as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" </dev/null >&2; then
      hash -r
      return 0
    fi
  fi
  echo "$purpose is left out; it needs: $*" >&2
  return 1
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Root, or a sudo that asks nothing, with apt-get and a registry that answers within 5 s.
can_install() {
  command -v apt-get >/dev/null 2>&1 || return 1
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null || return 1
  fi
  registry_answers
}

registry_answers() {
  local helper=/usr/lib/apt/apt-helper uri folder rc
  [ -x "$helper" ] || return 1
  uri=$(apt-get --print-uris update 2>/dev/null | sed -n "s/^'\([^']*InRelease\)'.*/\1/p" | head -n 1)
  [ -n "$uri" ] || return 1
  folder=$(mktemp -d) || return 1
  timeout 5 "$helper" -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=5 -o APT::Sandbox::User=root \
    download-file "$uri" "$folder/InRelease" >/dev/null 2>&1
  rc=$?
  rm -rf "$folder"
  return $rc
}

# The command for this machine's package manager; Debian's names elsewhere are the best hint there is.
install_command() {
  local sudo="" name
  [ "$(id -u)" -ne 0 ] && sudo="sudo "
  if command -v dnf >/dev/null 2>&1 && ! command -v apt-get >/dev/null 2>&1; then
    local names=()
    for name in "$@"; do
      case $name in
        g++) names+=(gcc-c++) ;;
        ninja-build) names+=(ninja-build) ;;
        libgtest-dev) names+=(gtest-devel) ;;
        libgmock-dev) names+=(gmock-devel) ;;
        libcli11-dev) names+=(cli11-devel) ;;
        nlohmann-json3-dev) names+=(json-devel) ;;
        clang-format | clang-tidy) names+=(clang-tools-extra) ;;
        libclang-rt-dev) names+=(compiler-rt) ;;
        libibverbs-dev) names+=(rdma-core-devel) ;;
        libfabric-dev) names+=(libfabric-devel) ;;
        libhwloc-dev) names+=(hwloc-devel) ;;
        openmpi-bin) names+=(openmpi) ;;
        iproute2) names+=(iproute) ;;
        ibverbs-utils) names+=(libibverbs-utils) ;;
        *) names+=("$name") ;;
      esac
    done
    echo "${sudo}dnf install -y ${names[*]}"
  else
    echo "${sudo}apt-get update && ${sudo}apt-get install -y $*"
  fi
}

have() { command -v "$1" >/dev/null 2>&1; }

# A C++20 compiler: CXX if set, else any of the usual names.
have_cxx() { { [ -n "${CXX:-}" ] && have "${CXX%% *}"; } || have c++ || have g++ || have clang++; }

# CMake, 3.22 or newer.
have_cmake() {
  have cmake || return 1
  local version
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
  # shellcheck disable=SC2086
  set -- $version
  [ "${1:-0}" -gt 3 ] || { [ "${1:-0}" -eq 3 ] && [ "${2:-0}" -ge 22 ]; }
}

cores() { nproc 2>/dev/null || echo 2; }
