#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins what bench/gpu/proxy.sh measured into one document (bench/schema.json) and prints it against its limits: each repeat's
figure, and whether the limit holds in each of them.

    proxy.py FOLDER     reads proxy-rows-*.json; writes proxy.json
"""
import os
import sys

import document


def main():
    folder = sys.argv[1]
    repeats = document.repeats(folder, "proxy-rows-*.json")
    rows = sum(repeats, [])
    if not rows:
        print("no figures")
        return 1
    document.write(os.path.join(folder, "proxy.json"), "bench/gpu/proxy.sh", rows, {"ring": 65536})

    def find(what, note="", statistic="median", **parameters):
        """Of each repeat; None where it has no such row."""
        found = []
        for repeat in repeats:
            values = [row["statistics"][statistic] for row in repeat
                      if row["what"] == what and note in row["note"]
                      and all(row["parameters"][key] == value for key, value in parameters.items())]
            found.append(values[0] if values else None)
        return found

    for row in rows:
        p, s = row["parameters"], row["statistics"]
        print(f"{row['what']:48} {p['producers']:6} producers {p['threads']} threads {s['median']:12.3f} {row['unit']:6} "
              f"({s['min']:.3f} .. {s['max']:.3f}, p99 {s['p99']:.3f})  {row['note']}{'' if row['verified'] else '  not checked'}")
    good = True

    def line(name, values, limits, at_least, unit, beside=(), of=""):
        """One figure of every repeat against the limit of the same repeat."""
        nonlocal good
        if not isinstance(limits, list):
            limits = [limits] * len(values)
        both = [(v, m) for v, m in zip(values, limits) if v is not None and m is not None]
        if not both:
            print(f"{name:58} not measured")
            return
        held = sum(v >= m if at_least else v <= m for v, m in both)
        good = good and held == len(both)
        digits = 4 if max(v for v, _ in both) < 1 else 2
        sign = ">=" if at_least else "<="
        print(f"{name:58} {' '.join(f'{v:.{digits}f}' for v, _ in both):28} {sign} "
              f"{' '.join(sorted({f'{m:.{digits}f}' for _, m in both})):10} {unit:6} "
              f"{'holds' if held == len(both) else f'MISSED in {len(both) - held}'} of {len(both)}"
              + (f"  {of} {' '.join(f'{v:.{digits}f}' for v in beside if v is not None)}" if any(beside) else ""))

    def times(factor, values):
        return [factor * value if value is not None else None for value in values]

    print()
    each = "each turn"
    for producers in (1024, 16896):
        line(f"{producers} producers, one thread: of the bare ring, by turns", find(f"proxy / bare ring, {each}", producers=producers, threads=1),
             0.5, True, "x", find("bare ring: descriptors", producers=producers, threads=1), "bare")
        line("  the same with the default ring", find(f"proxy / bare ring, default ring, {each}", producers=producers),
             0.5, True, "x", find("proxy: descriptors, default ring", producers=producers), "ours")
    line("1024 producers, one thread: never below", find("proxy: descriptors", producers=1024, threads=1), 40, True, "Mops/s")
    line("four threads: gain, of the bare rings' gain, by turns",
         find(f"proxy: gain by threads / bare ring's, {each}", producers=1024, threads=4), 0.85, True, "x",
         find("proxy: descriptors", producers=1024, threads=4), "ours")
    line("one way: 1.1 x the bare ring", find("proxy: one way"), times(1.1, find("bare ring: one way")), False, "ns")
    line("issue of an inline put", find("proxy: issue of an inline put"), 80, False, "ns", find("bare ring: issue"), "bare")
    for us, share in ((100, 0.04), (1000, 0.005)):
        line(f"idle at {us} us: share of a core", find("proxy: share of a core when idle", f"SLEEP_US={us};"), share, False, "",
             find("bare thread that sleeps: share of a core", f"SLEEP_US={us};"), "a thread that only sleeps:")
        line(f"  first put after a pause, median, at {us} us",
             times(1e-3, find("proxy: first put after 10 ms of nothing", f"SLEEP_US={us};")), us, False, "us")
    line("1024 producers: of MSCCL++'s FIFO, by turns", find(f"proxy / MSCCL++ FIFO, {each}", producers=1024), 1, True, "x",
         find("MSCCL++ FIFO: descriptors, in turns"), "theirs")
    theirs = [min(w for w in ways if w is not None) if any(ways) else None
              for ways in zip(find("MSCCL++ FIFO: one way", "FIFO of 512"), find("MSCCL++ FIFO: one way", "FIFO of 65536"))]
    line("one way: MSCCL++'s FIFO", find("proxy: one way"), theirs, False, "ns")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
