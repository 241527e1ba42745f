#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins what bench/gpu/run.sh measured into one document (bench/schema.json) and prints it against the floor.

    report.py FOLDER     reads perf-*.json, floor-*.json, cells.json; writes lsa.json
A figure that was taken several times stands in the document as often; the table has the one in the middle.
"""
import glob
import json
import os
import sys


def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        print(f"not read: {error}")
        return None


def find(rows, what, bytes_=None, note="", **wanted):
    found = [row for row in rows
             if row["what"] == what and row.get("path", "lsa") == "lsa" and note in row.get("note", "")
             and bytes_ in (None, row["parameters"].get("bytes"))
             and all(row["parameters"].get(key) == value for key, value in wanted.items())]
    found.sort(key=lambda row: row["statistics"]["median"])
    return found[len(found) // 2] if found else None


def in_us(row):
    return row["statistics"]["median"] * (1e-3 if row["unit"] == "ns" else 1)


def write_conformance(folder, document):
    """The totals of the matrices as a document of their own."""
    rows = []
    for matrix in ("pairs", "ranks"):
        part = load(os.path.join(folder, f"conformance-{matrix}.json")) or []
        for row in part:
            row["parameters"]["matrix"] = {"pairs": "each path, 1 to 7 ranks", "ranks": "4 and 8 ranks as threads"}[matrix]
        rows += part
    if not rows:
        return
    document["parameters"] = {}
    document["results"] = rows
    document.pop("inventory", None)
    with open(os.path.join(folder, "conformance.json"), "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def main():
    folder = sys.argv[1]
    document, rows = None, []
    for path in sorted(glob.glob(os.path.join(folder, "perf-*.json"))):
        part = load(path)
        if part is None:
            continue
        document = document or part
        processes = "processes" in os.path.basename(path)
        for row in part["results"]:
            row.pop("samples", None)
            row["parameters"]["ranks_as"] = "processes" if processes else "threads"
            rows.append(row)
    if document is None:
        print("no figures")
        return 1
    floor = []
    for path in sorted(glob.glob(os.path.join(folder, "floor-*.json"))):
        floor += load(path) or []
    cells = load(os.path.join(folder, "cells.json")) or []
    document["command"] = "bench/gpu/run.sh"
    write_conformance(folder, dict(document))
    document["parameters"] = {}
    document["results"] = rows + floor + cells
    document.pop("inventory", None)
    with open(os.path.join(folder, "lsa.json"), "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")

    print(f"{'figure':44} {'marrow':>10} {'floor':>10} {'ratio':>7}  limit")
    good = True

    def line(name, value, floor_value, limit, holds, unit):
        nonlocal good
        good = good and holds
        ratio = f"{value / floor_value:7.3f}" if floor_value else "       "
        base = f"{floor_value:10.3f}" if floor_value else " " * 10
        print(f"{name:44} {value:10.3f} {base} {ratio}  {limit} {'' if holds else '<-- MISSED'} {unit}")

    mega = 64 << 20
    # Both on the same memory, in turns: where a word lies in L2 changes its latency by a tenth.
    for window in sorted({row["parameters"].get("window") for row in rows} - {None}):
        row = find(rows, "put latency", 8, window=window)
        base = find(rows, "floor: put + signal", 8, window=window)
        where = f"{'64 MiB' if window >= mega else str(window) + ' B'} window"
        line(f"put + strong signal, 8 B, {where}", in_us(row), in_us(base), "<= 1.05 x floor",
             in_us(row) <= 1.05 * in_us(base), "us")
    for how in ("threads", "processes"):
        row = find(rows, "put latency", 8, ranks_as=how, window=None)
        base = find(floor, "floor: put + signal", 8, "memory", threads=1)
        if row and base:
            line(f"put + strong signal, 8 B, {how}, other memory", in_us(row), in_us(base), "(for information)", True, "us")
        row = find(rows, "put bandwidth", mega, ranks_as=how)
        base = find(floor, "floor: raw copy", mega, blocks=8)
        if row and base:
            value, least = row["statistics"]["median"], base["statistics"]["median"]
            line(f"put bandwidth, 64 MiB, 8 x 1024, {how}", value, least, ">= 0.95 x raw copy", value >= 0.95 * least, "GB/s")
    for size, limit in ((8, 0.85), (1024, 1.0)):
        row, base = find(rows, "packet latency", size), find(floor, "floor: packet", size)
        if row:
            line(f"packet, {size} B", in_us(row), in_us(base) if base else 0, f"<= {limit} us", in_us(row) <= limit, "us")
    row = find(rows, "alltoall time", 65536, ranks=2)
    if row:
        line("all-to-all, 2 ranks, 64 KiB", in_us(row), 0, "<= 6.5 us", in_us(row) <= 6.5, "us")
    row = find(rows, "alltoall algbw", mega, ranks=2)
    both = [find(floor, "floor: raw copy, both directions", mega, blocks=blocks) for blocks in (8, 16, 32, 64, 132)]
    base = max((r["statistics"]["median"] for r in both if r), default=0)
    if row:
        value = row["statistics"]["median"]
        line("all-to-all, 2 ranks, 64 MiB, algbw", value, 2 * base, ">= 680 GB/s", value >= 680, "GB/s")
    return 0 if good else 1


sys.exit(main())
