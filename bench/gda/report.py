#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes one document (bench/schema.json) of what marrow_gda_issue wrote, and prints the figures that have a limit.

    report.py ROWS.json OUT.json COMMIT
Exit status 1 if a limit is missed.
"""
import json
import os
import platform
import subprocess
import sys
import time


def gpu(what):
    answer = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True,
                            text=True, check=False).stdout.split("\n")
    return [line.strip() for line in answer if line.strip()]


def cpu():
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    with open(sys.argv[1]) as file:
        rows = json.load(file)
    for row in rows:
        if not row.get("note"):
            row.pop("note", None)
    document = {
        "schema": "marrow.bench.1", "command": "bench/gpu/gda_issue.sh", "version": "0.1.0", "commit": sys.argv[3],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"host": platform.node(), "os": f"{platform.system()} {platform.release()} {platform.machine()}",
                    "cpu": cpu(), "cores": os.cpu_count(), "gpus": gpu("name"),
                    "driver": (gpu("driver_version") or [""])[0]},
        "parameters": {}, "results": rows}
    with open(sys.argv[2], "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")

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
    own = issue("put 64 B", "thread")
    line("exclusive put", own, floor, "<= 1.05 x floor", own <= 1.05 * floor, "ns")
    if theirs:
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
