#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The proxy path on the verbs network beside its floors, in one run: bare verbs on the same NIC, network.h, and
`marrow perf`.

    cmake --build BUILD --target marrow_cli marrow_verbs_floor
    bench/verbs/run.py BUILD [--iterations N] [--json FILE]

MARROW_NIC chooses the NIC; softnic's figures are emulated.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys


def statistics(samples):
    ordered = sorted(samples)
    mean = sum(ordered) / len(ordered)
    return {"count": len(ordered), "min": ordered[0], "median": ordered[len(ordered) // 2], "mean": round(mean, 1),
            "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], "max": ordered[-1],
            "stddev": round(math.sqrt(sum((s - mean) ** 2 for s in ordered) / len(ordered)), 1)}


def perf(build, operation, size, iterations):
    command = [build / "bin" / "marrow", "perf", operation, "--path", "proxy", "--network", "verbs", "--sizes", size,
               "--iterations", str(iterations), "--json", "-"]
    run = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    return json.loads(run.stdout[run.stdout.index("{"):])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    whole = perf(options.build, "put_value", "8", options.iterations)
    rows = [r for r in whole["results"] if r.get("unit") in ("us", "ns")]
    for operation, size in (("put", "8"), ("put", "4K"), ("get", "8")):
        more = perf(options.build, operation, size, options.iterations)["results"]
        rows += [r for r in more if r.get("unit") in ("us", "ns")]
    kind, devices = rows[0]["kind"], [d for d in rows[0]["devices"] if d["role"] != "kernels"]
    floor = subprocess.run([str(options.build / "bin" / "marrow_verbs_floor"), str(options.iterations)], check=True,
                           capture_output=True, text=True).stdout
    for each in json.loads(floor):
        rows.append({"what": each["what"], "unit": "ns", "kind": kind,
                     "devices": [{"role": "posts", "device": "cpu", "name": ""}] + devices,
                     "parameters": {"iterations": options.iterations}, "statistics": statistics(each["samples"]),
                     "verified": True})
    whole["command"] = "bench/verbs/run.py"
    whole["results"] = rows
    print(f"{'what':64} {'min':>9} {'median':>9} {'p99':>11}  unit, kind")
    for row in rows:
        s = row["statistics"]
        size = row["parameters"].get("bytes")
        name = row["what"] + (f", {size} bytes" if size else "")
        print(f"{name:64} {s['min']:9.2f} {s['median']:9.2f} {s['p99']:11.2f}  {row['unit']}, {row['kind']}")
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
