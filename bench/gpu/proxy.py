#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins what bench/gpu/proxy.sh measured into one document (bench/schema.json) and prints it against its limits.

    proxy.py FOLDER     reads proxy-rows-*.json; writes proxy.json
"""
import datetime
import glob
import json
import os
import re
import statistics
import sys

from gda_engine import machine, output


def main():
    folder = sys.argv[1]
    rows = []
    for path in sorted(glob.glob(os.path.join(folder, "proxy-rows-*.json"))):
        with open(path) as file:
            rows += json.load(file)
    if not rows:
        print("no figures")
        return 1
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "..", "..", "CMakeLists.txt")) as file:
        version = re.search(r"VERSION ([0-9]+\.[0-9]+\.[0-9]+)", file.read().split("project(", 1)[-1])
    document = {"schema": "marrow.bench.1", "command": "bench/gpu/proxy.sh",
                "version": version.group(1) if version else "0.0.0",
                "commit": os.environ.get("COMMIT") or output("git", "-C", here, "rev-parse", "--short", "HEAD") or "unknown",
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "machine": machine(), "parameters": {"ring": 65536}, "results": rows}
    with open(os.path.join(folder, "proxy.json"), "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")

    def find(what, note="", **parameters):
        found = [row["statistics"]["median"] for row in rows
                 if row["what"] == what and note in row["note"]
                 and all(row["parameters"][key] == value for key, value in parameters.items())]
        return statistics.median(found) if found else None

    for row in rows:
        p, s = row["parameters"], row["statistics"]
        print(f"{row['what']:46} {p['producers']:6} producers {p['threads']} threads {s['median']:12.3f} {row['unit']:6} "
              f"({s['min']:.3f} .. {s['max']:.3f}, p99 {s['p99']:.3f})  {row['note']}{'' if row['verified'] else '  not checked'}")
    good = True

    def line(name, value, limit, at_least, unit, comment=""):
        nonlocal good
        if value is None or limit is None:
            print(f"{name:58} not measured")
            return
        holds = value >= limit if at_least else value <= limit
        good = good and holds
        print(f"{name:58} {value:10.3f} {'>=' if at_least else '<='} {limit:10.3f} {unit:6} "
              f"{'holds' if holds else 'MISSED'}  {comment}")

    def times(factor, value):
        return factor * value if value is not None else None

    print()
    ours = lambda producers, threads: find("proxy: descriptors", producers=producers, threads=threads)
    bare = lambda producers, threads: find("bare ring: descriptors", producers=producers, threads=threads)
    for producers in (1024, 16896):
        line(f"{producers} producers, one thread: half of the bare ring", ours(producers, 1), times(0.5, bare(producers, 1)),
             True, "Mops/s", f"bare {bare(producers, 1) or 0:.1f}")
        line("  the same with the default ring", find("proxy: descriptors, default ring", producers=producers),
             times(0.5, bare(producers, 1)), True, "Mops/s")
    line("1024 producers, one thread: never below", ours(1024, 1), 40, True, "Mops/s")
    for threads in (4,):
        if bare(1024, 1) and bare(1024, threads) and ours(1024, 1):
            line(f"{threads} threads: 0.85 x bare scaling x one thread", ours(1024, threads),
                 0.85 * bare(1024, threads) / bare(1024, 1) * ours(1024, 1), True, "Mops/s",
                 f"bare {bare(1024, 1):.1f} -> {bare(1024, threads):.1f}")
    line("one way: 1.1 x the bare ring", find("proxy: one way"), times(1.1, find("bare ring: one way")), False, "ns",
         f"bare {find('bare ring: one way') or 0:.0f}")
    line("issue of an inline put", find("proxy: issue of an inline put"), 80, False, "ns",
         f"bare {find('bare ring: issue') or 0:.0f}")
    idle = "proxy: share of a core when idle"
    line("idle at 100 us: share of a core", find(idle, "SLEEP_US=100;"), 0.04, False, "",
         f"a bare sleeper {find('bare thread that sleeps: share of a core', 'SLEEP_US=100;') or 0:.3f}")
    line("idle at 1 ms: share of a core", find(idle, "SLEEP_US=1000;"), 0.005, False, "",
         f"a bare sleeper {find('bare thread that sleeps: share of a core', 'SLEEP_US=1000;') or 0:.4f}")
    fifo = [find("MSCCL++ FIFO: descriptors", note, producers=1024) for note in ("FIFO of 512", "FIFO of 65536")]
    if any(fifo):
        line("1024 producers: MSCCL++'s FIFO", ours(1024, 1), max(f for f in fifo if f), True, "Mops/s")
        ways = [find("MSCCL++ FIFO: one way", note) for note in ("FIFO of 512", "FIFO of 65536")]
        line("one way: MSCCL++'s FIFO", find("proxy: one way"), min(w for w in ways if w), False, "ns")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
