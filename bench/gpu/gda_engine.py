#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins what bench/gpu/gda_engine.sh measured into one document (bench/schema.json) and prints it against its limits.

    gda_engine.py FOLDER     reads rows-*.json; writes gda-engine.json
"""
import os
import sys

import document


def middle(rows, what, bytes_, threads=None):
    found = sorted(row["statistics"]["median"] for row in rows
                   if row["what"] == what and row["parameters"]["bytes"] == bytes_
                   and threads in (None, row["parameters"]["worker_threads"]))
    return found[len(found) // 2] if found else None


def main():
    folder = sys.argv[1]
    rows = sum(document.repeats(folder, "rows-*.json"), [])
    if not rows:
        print("no figures")
        return 1
    document.write(os.path.join(folder, "gda-engine.json"), "bench/gpu/gda_engine.sh", rows)

    good = True

    def line(name, ours, bare, limit, more_is_better, scale, unit):
        nonlocal good
        if ours is None or bare is None:
            print(f"{name:44} not measured")
            good = False
            return
        ratio = ours / bare
        holds = ratio >= limit if more_is_better else ratio <= limit
        good = good and holds
        print(f"{name:44} {ours * scale:9.2f} {unit:6} bare {bare * scale:9.2f}  ratio {ratio:5.2f}  "
              f"{'>=' if more_is_better else '<='} {limit}  {'holds' if holds else 'MISSED'}")

    once, api = "GPU engine: post to completion", "GPU engine: put and flush"
    bare = "bare engine: post to completion"
    mib = 1 << 20
    for threads in (1, 1024):
        worker = "one thread" if threads == 1 else "one block"
        line(f"8 B, post to completion (bare: {worker})", middle(rows, once, 8), middle(rows, bare, 8, threads),
             1.35, False, 1e-3, "us")
        line(f"8 B, put and flush (bare: {worker})", middle(rows, api, 8), middle(rows, bare, 8, threads),
             1.35, False, 1e-3, "us")
    line("8 B, 32 queues, doorbell per 32", middle(rows, "GPU engine: rate", 8),
         middle(rows, "bare engine: rate", 8), 0.5, True, 1, "Mops/s")
    line("the same by put and flush", middle(rows, "GPU engine: put rate", 8),
         middle(rows, "bare engine: rate", 8), 0.5, True, 1, "Mops/s")
    rate = lambda time: mib / time if time else None
    line("1 MiB, post to completion", rate(middle(rows, once, mib)), rate(middle(rows, bare, mib)), 0.9, True, 1, "GB/s")
    line("1 MiB, put and flush", rate(middle(rows, api, mib)), rate(middle(rows, bare, mib)), 0.9, True, 1, "GB/s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
