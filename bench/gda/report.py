#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes one document (bench/schema.json) of what marrow_gda_issue wrote, and prints the figures that have a limit.

    report.py ROWS.json OUT.json
Exit status 1 if a limit is missed.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu"))
import document  # noqa: E402


def main():
    rows = document.load(sys.argv[1])
    for row in rows:
        if not row.get("note"):
            row.pop("note", None)
    document.write(sys.argv[2], "bench/gpu/gda_issue.sh", rows)

    def find(what, unit="ns", note="", **parameters):
        for row in rows:
            if (row["what"] == what and row["unit"] == unit and row.get("note", "") == note
                    and all(row["parameters"].get(k) == v for k, v in parameters.items())):
                return row["statistics"]["median"]
        return None

    def issue(what, sharing, batch="1", note=""):
        return find(f"gda issue: {what}", note=note, sharing=sharing, queue_memory="device", release_scope="device",
                    wqe_per_doorbell=batch)

    def rate(what, sharing, threads, queues):
        return find(f"gda issue: {what}", "Mops/s", sharing=sharing, threads=threads, queues=queues)

    good = True
    print(f"{'figure':52} {'marrow':>10} {'against':>10} {'ratio':>7}  limit")

    def line(name, value, against, limit, holds, unit):
        nonlocal good
        if value is None:
            print(f"{name:52} not measured")
            return
        good = good and holds
        other = f"{against:10.1f} {value / against:7.3f}" if against else " " * 18
        print(f"{name:52} {value:10.1f} {other}  {limit:28} {'' if holds else '<-- MISSED'} {unit}")

    floor = issue("floor", "thread")
    skip = "availability check skipped"
    theirs = issue("gpunetio put 64 B", "thread", note=skip)
    held = issue("put 64 B", "thread", note="queue held by the thread")
    own = issue("put 64 B", "thread")
    line("exclusive put, queue held", held, floor, "<= 1.05 x floor", held <= 1.05 * floor, "ns")
    line("exclusive put, plain Gin", own, floor, "(see held)", True, "ns")
    if theirs:
        line("exclusive put, queue held", held, theirs, "<= 0.6 x gpunetio", held <= 0.6 * theirs, "ns")
        line("exclusive put", own, theirs, "<= 0.6 x gpunetio", own <= 0.6 * theirs, "ns")
    for sharing, most in (("block", 800), ("device", 1100)):
        value = issue("put 64 B", sharing)
        line(f"{sharing}-shared put", value, issue("gpunetio put 64 B", sharing, note=skip), f"<= {most} ns", value <= most,
             "ns")
    for sharing in ("thread", "block", "device"):
        value = issue("put 64 B", sharing) - issue("put 64 B", sharing, note="without the check for room")
        line(f"availability check, {sharing}", value, None, "<= 100 ns", value <= 100, "ns")
    for queues, least in ((8, 100), (132, 300)):
        value = rate("put 64 B rate", "device", 16896, queues)
        line(f"16896 threads sharing {queues} queues", value, rate("gpunetio rate, put", "device", 16896, queues),
             f">= {least} M WQE/s", value >= least, "M/s")
    value, base = rate("put 64 B rate, each lane", "thread", 4224, 132), rate("floor rate, each lane", "thread", 4224, 132)
    line("132 exclusive queues, warp posts of 32", value, base, ">= 0.85 x floor", value >= 0.85 * base, "M/s")
    registers = find("gda probe: exclusive put, bounded to 24 registers, registers", "count",
                     "one operation in an otherwise empty kernel")
    line("registers of an exclusive put", registers, None, "<= 24", registers is not None and registers <= 24, "")
    print("all limits hold" if good else "SOME LIMITS ARE MISSED")
    return 0 if good else 1


sys.exit(main())
