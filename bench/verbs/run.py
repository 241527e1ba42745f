#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The proxy path on the verbs network beside its floors, in one run: bare verbs on the same NIC, network.h, and
`marrow perf`.

    cmake --build BUILD --target marrow_cli marrow_verbs_floor
    bench/verbs/run.py BUILD [--iterations N] [--repeats N] [--json FILE]

BUILD: a build tree, or a folder with its programs. Each repeat takes all figures one after the other; the table has the
median of each.

MARROW_NIC chooses the NIC; softnic's figures are emulated.
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys


def statistics(samples):
    ordered = sorted(samples)
    mean = sum(ordered) / len(ordered)
    return {"count": len(ordered), "min": ordered[0], "median": ordered[len(ordered) // 2], "mean": round(mean, 1),
            "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], "max": ordered[-1],
            "stddev": round(math.sqrt(sum((s - mean) ** 2 for s in ordered) / len(ordered)), 1)}


def program(build, name):
    return build / "bin" / name if (build / "bin" / name).exists() else build / name


def perf(build, operation, size, iterations):
    command = [program(build, "marrow"), "perf", operation, "--path", "proxy", "--network", "verbs", "--sizes", size,
               "--iterations", str(iterations), "--json", "-"]
    run = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    return json.loads(run.stdout[run.stdout.index("{"):])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for repeat in range(1, options.repeats + 1):
        mine = []
        for operation, size in (("put_value", "8"), ("put", "8"), ("put", "4K"), ("get", "8")):
            whole = perf(options.build, operation, size, options.iterations)
            mine += [r for r in whole["results"] if r.get("unit") in ("us", "ns")]
        soft = os.environ.get("MARROW_NIC", "").startswith("softnic") or mine[0]["kind"] == "emulated"
        nic = {"role": "NIC", "device": "softnic" if soft else "nic", "name": os.environ.get("MARROW_NIC", "auto")}
        floor = subprocess.run([str(program(options.build, "marrow_verbs_floor")), str(options.iterations)], check=True,
                               capture_output=True, text=True).stdout
        for each in json.loads(floor):
            mine.append({"what": each["what"], "unit": "ns", "kind": "emulated" if soft else "measured (host)",
                         "devices": [{"role": "posts and polls", "device": "host", "name": "thread"}, nic],
                         "parameters": {"iterations": options.iterations}, "statistics": statistics(each["samples"]),
                         "verified": True})
        for row in mine:
            row.pop("samples", None)
            row["parameters"]["repeat"] = repeat
        rows += mine
    whole["command"] = "bench/verbs/run.py"
    whole["results"] = rows
    whole["parameters"] = {"iterations": options.iterations}
    print(f"{'what':60} {'medians of the repeats, us':40} {'least':>7} {'largest p99':>12}  kind")
    for row in rows:
        if row["parameters"]["repeat"] != 1:
            continue
        size = row["parameters"].get("bytes")
        scale = 1e-3 if row["unit"] == "ns" else 1
        alike = [r["statistics"] for r in rows if r["what"] == row["what"] and r["parameters"].get("bytes") == size]
        medians = " ".join(f"{s['median'] * scale:.2f}" for s in alike)
        print(f"{row['what'] + (f', {size} bytes' if size else ''):60} {medians:40} {min(s['min'] for s in alike) * scale:7.2f} "
              f"{max(s['p99'] for s in alike) * scale:12.2f}  {row['kind']}")
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
