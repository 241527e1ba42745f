#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Debian's own RDMA tools (ibverbs-utils) on softnic: LD_LIBRARY_PATH names the folder of the
# replacement libraries. A tool that is not installed is skipped, exit status 77.
set -u
MARROW_SOFTNIC="job=tools-$$"
export MARROW_SOFTNIC
port=$((20000 + $$ % 20000))

need() {
  command -v "$1" > /dev/null && return
  echo "skipped: $1 is not installed"
  exit 77
}

# Runs the same command as server and as client; both must succeed within their time.
both() {
  timeout 40 "$@" > "$log.server" 2>&1 &
  local server=$! status=1
  for _ in $(seq 100); do
    if timeout 40 "$@" localhost > "$log.client" 2>&1; then
      status=0
      break
    fi
    grep -qi "connect" "$log.client" || break  # only a server that is not up yet is waited for
    sleep 0.1
  done
  wait "$server" || status=1
  cat "$log.client"
  [ $status = 0 ] || cat "$log.server"
  return $status
}

log=$(mktemp -d)/log
trap 'rm -rf "$(dirname "$log")"' EXIT
case $1 in
  devinfo)
    need ibv_devinfo
    ibv_devinfo -v > "$log" || exit 1
    cat "$log"
    [ "$(grep -c hca_id "$log")" = 1 ] && grep -q "mlx5_softnic0" "$log" && grep -q PORT_ACTIVE "$log" &&
      grep -qE "port_lid:[[:space:]]*[1-9]" "$log" && grep -qE "link_layer:[[:space:]]*InfiniBand" "$log" || exit 1
    # A bad option: the tool cannot open the device, and the reason is there to read.
    MARROW_SOFTNIC=speed=9 ibv_devinfo > "$log" 2>&1 && exit 1
    grep -q "softnic has no option 'speed=9'" "$log" || { cat "$log"; exit 1; }
    ;;
  rc_pingpong) need ibv_rc_pingpong; both ibv_rc_pingpong -p $port -n 500 -c ;;
  rc_pingpong_events) need ibv_rc_pingpong; both ibv_rc_pingpong -p $port -n 100 -s 100000 -e -c ;;
  srq_pingpong) need ibv_srq_pingpong; both ibv_srq_pingpong -p $port -n 100 ;;
  *) echo "no such test: $1"; exit 2 ;;
esac
