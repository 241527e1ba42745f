#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a post on the gda path costs on this machine's first GPU: checks each row's queues, measures, prints the
# figures that have a limit and writes OUT/gda-issue.json (bench/schema.json). No NIC, no engine.
#   bench/gpu/gda_issue.sh BUILD [OUT]     BUILD: a build tree with marrow_gda_issue, or a folder with it
#   COMMIT=...                             what the figures are of; default: git's
set -u
build=${1:?usage: bench/gpu/gda_issue.sh BUILD [OUT]}
out=${2:-gpu-results}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/gpu/programs.sh
. "$here/programs.sh"
program=$(need_program marrow_gda_issue) || exit
timeout 100 "$program" --json "$out/gda-issue-rows.json"
status=$?
[ $status = 77 ] && echo "skipped: no GPU" && exit 77
python3 "$here/../gda/report.py" "$out/gda-issue-rows.json" "$out/gda-issue.json" || status=1
exit $status
