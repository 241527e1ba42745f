# SPDX-License-Identifier: Apache-2.0
"""Runs Marrow's test suites. Called by ./test, which sees to the packages.

One mechanism for all: a suite is a function that returns counts; the driver times it, prints one line, and at the
end a table of seconds and one line of sums. A suite with nothing in it is shown as skipped with the reason; a run
that executed no test at all fails.
"""
import argparse
import os
import sys
import time

sys.dont_write_bytecode = True  # nothing is written outside build/
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from marrow_tests import harness, suites  # noqa: E402

LIMIT_SECONDS = 25 * 60
FULL_LIMIT_SECONDS = 80 * 60


def parse(argv):
    parser = argparse.ArgumentParser(prog="./test", add_help=False)
    parser.add_argument("--suite", action="append", default=[])
    for flag in ("full", "coverage", "soak", "fuzz", "list"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args(argv)


def choose(options):
    """The suites to run, in order, or exits 2 on an unknown name."""
    known = {s.name: s for s in suites.ALL}
    for name in options.suite:
        if name not in known:
            print(f"./test: no suite is called '{name}'. Next: take one of {', '.join(known)}.", file=sys.stderr)
            sys.exit(2)
    if options.suite:
        wanted = set(options.suite)
    else:
        wanted = set()
        for flag in ("coverage", "soak", "fuzz"):
            if getattr(options, flag):
                wanted.add(flag)
        if not wanted or options.full:
            wanted |= {s.name for s in suites.ALL if s.when == "always" or (options.full and s.when == "full")}
    for name in list(wanted):
        wanted |= set(known[name].needs)
    return [s for s in suites.ALL if s.name in wanted]


def table(rows, total_seconds):
    head = ("suite", "passed", "failed", "skipped", "seconds", "note")
    cells = [head] + [(n, str(r.passed), str(r.failed), str(r.skipped), f"{t:.1f}", r.note) for n, r, t in rows]
    cells.append(("all", str(sum(r.passed for _, r, _ in rows)), str(sum(r.failed for _, r, _ in rows)),
                  str(sum(r.skipped for _, r, _ in rows)), f"{total_seconds:.1f}", ""))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    print()
    for row in cells:
        text = [row[0].ljust(widths[0])] + [row[i].rjust(widths[i]) for i in range(1, 5)] + [row[5]]
        print("  ".join(text).rstrip())


def main(argv):
    options = parse(argv)
    if options.list:
        for suite in suites.ALL:
            extra = "" if suite.when == "always" else f"  (only with --{suite.when})"
            print(f"{suite.name:12} {suite.about}{extra}")
        return 0
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    long = options.full or options.soak or options.coverage or options.fuzz
    limit = FULL_LIMIT_SECONDS if long else LIMIT_SECONDS
    context = harness.Context(deadline=time.monotonic() + limit, full=options.full,
                              thorough=options.full or bool(options.suite), long_fuzz=options.fuzz)
    rows = []
    setup = float(os.environ.get("MARROW_TEST_SETUP_SECONDS", "0"))
    if setup:
        rows.append(("packages", harness.Result(note="installed"), setup))
    started = time.monotonic() - setup
    broken = set()
    for suite in choose(options):
        if context.left() <= 0:
            result, seconds = harness.Result(failed=1, note=f"not run: the limit of {limit // 60} minutes passed"), 0.0
        elif broken & set(suite.needs):
            result, seconds = harness.Result(failed=1, note="not run: its build failed"), 0.0
        else:
            print(f"== {suite.name}: {suite.about}", flush=True)
            begin = time.monotonic()
            try:
                result = suite.run(context)
            except harness.OutOfTime as error:
                result = harness.Result(failed=1, note=str(error))
            seconds = time.monotonic() - begin
        if result.failed and suite.name.startswith("build"):
            broken.add(suite.name)
        rows.append((suite.name, result, seconds))
        verdict = "FAILED" if result.failed else ("ok" if result.passed else "skipped")
        print(f"   {verdict}: {result.passed} passed, {result.failed} failed, {result.skipped} skipped, "
              f"{seconds:.1f} s{'  ' + result.note if result.note else ''}", flush=True)
    table(rows, time.monotonic() - started)
    passed, failed, skipped = (sum(getattr(r, k) for _, r, _ in rows) for k in ("passed", "failed", "skipped"))
    if passed + failed == 0:
        print("No test ran. Next: ./test --list shows the suites.")
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
