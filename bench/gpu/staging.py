#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes one document of what bench/gpu/staging.sh measured and prints it by size.

    staging.py FOLDER     reads staging-rows.json; writes staging.json
"""
import os
import re
import sys

import document


def main():
    folder = sys.argv[1]
    rows = document.load(os.path.join(folder, "staging-rows.json"))
    document.write(os.path.join(folder, "staging.json"), "bench/gpu/staging.sh", rows,
                   {"MARROW_PROXY_STAGE": "always", "MARROW_NETWORK": "shm"})

    table = {}
    for row in rows:
        what, size = re.match(r"(.*), (\d+) bytes", row["what"]).groups()
        key = (row["note"], row["parameters"]["producers"])
        table.setdefault(what, {}).setdefault(int(size), {})[key] = row["statistics"]["median"]

    for what, sizes in table.items():
        ways = sorted({key for ways in sizes.values() for key in ways})
        unit = "GB/s" if all(row["unit"] == "GB/s" for row in rows if row["what"].startswith(what + ", ")) else "us"
        print(f"\n{what}, {unit}")
        print(f"{'bytes':>10}" + "".join(f"{f'{note}, {threads} threads':>30}" for note, threads in ways))
        for size in sorted(sizes):
            cells = [sizes[size].get(key) for key in ways]
            print(f"{size:>10}" + "".join(
                f"{'' if cell is None else format(cell / (1000 if unit == 'us' else 1), '.2f'):>30}" for cell in cells))
        engine = next((key for key in ways if key[0] == "copy engine"), None)
        for key in ways:
            if key[0] == "copy engine" or not engine:
                continue
            faster = [size for size in sorted(sizes) if key in sizes[size] and engine in sizes[size]
                      and sizes[size][key] < sizes[size][engine]]
            slower = [size for size in sorted(sizes) if key in sizes[size] and engine in sizes[size]
                      and sizes[size][key] >= sizes[size][engine]]
            upto = max((size for size in faster if not slower or size < min(slower)), default=0)
            print(f"  written by {key[1]} threads: faster than the copy engine up to {upto} bytes"
                  + ("" if slower else ", the largest measured"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
