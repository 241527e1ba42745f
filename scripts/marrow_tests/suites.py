# SPDX-License-Identifier: Apache-2.0
"""Every suite of ./test, in the order in which they run: cheap checks that need no build come first."""
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from . import clean_clone, examples
from .harness import (BUILD, CORES, LOGS, ROOT, Result, build, configure, ctest, pytest, skip, test_environment,
                      tracked)

SOURCES = (".cpp", ".hpp", ".h", ".cuh", ".cu")
TIDY_FILES = 24
FAST_DEBUG = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -g1")  # of preset debug: its checks, not its -O0
CUDA_FULL = "80-real;90a-real;100-real;100-virtual"


@dataclasses.dataclass
class Suite:
    name: str
    about: str
    run: Callable
    when: str = "always"  # or the option that asks for it
    needs: tuple = ()


def built(context, preset, *targets, extra=(), folder=None):
    """Configures and builds one preset; a Result with a failure, or None when it worked."""
    if configure(context, preset, *extra, folder=folder):
        return Result(failed=1, note="cmake failed")
    if build(context, folder or preset, *targets):
        return Result(failed=1, note="the build failed")
    return None


def build_release(context):
    return built(context, "release") or Result(passed=1)


def labelled(label, folder=None):
    """A suite of both kinds: ctests with the label in build/release, and pytest files in tests/<label>."""
    def run(context):
        result = ctest(context, "release", label) + pytest(context, f"tests/{folder or label}", label)
        return result if result.passed + result.failed + result.skipped else skip(f"no {label} test yet")
    return run


def sanitizer(preset):
    def run(context):
        # Those that say asan-all or tsan-all only with --full: two cores build an instrumented test in half a minute.
        every = "ON" if context.thorough else "OFF"
        failed = built(context, preset, "marrow_tests", extra=(f"-DMARROW_SANITIZE_ALL={every}",))
        if failed:
            return failed
        result = ctest(context, preset, "", name=preset)
        return result if result.passed + result.failed else skip(f"no test names {preset} yet")
    return run


def format_check(context):
    files = tracked(*SOURCES)
    if context.run(["clang-format", "--dry-run", "--Werror", *files], "format", quiet=True) == 0:
        return Result(passed=1)
    complaints = (LOGS / "format.log").read_text(errors="replace")
    bad = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", complaints, re.M)))
    for name in bad:
        print(f"   | {name}")
    return Result(failed=1, note=f"scripts/format would change {len(bad)} files")


def shell_check(context):
    if not shutil.which("shellcheck"):
        return skip("no shellcheck")
    scripts = [n for n in tracked("") if not n.endswith((".py", ".md")) and _is_bash(n)]
    status = context.run(["shellcheck", "-x", "-e", "SC2065", *scripts], "shellcheck")
    return Result(failed=1) if status else Result(passed=1)


def _is_bash(name):
    with open(ROOT / name, "rb") as file:
        return file.read(32).startswith((b"#!/usr/bin/env bash", b"#!/bin/bash", b"#!/bin/sh"))


def recently_changed(limit):
    """The sources of src/ that changed last, newest first: what is not committed, then the last commits."""
    git = ["git", "-c", f"safe.directory={ROOT}"]
    names = []
    for command in (["diff", "--name-only", "HEAD"], ["log", "-n", "200", "--name-only", "--format="]):
        out = subprocess.run([*git, *command, "--", "src/*.cpp"], cwd=ROOT, capture_output=True, text=True, check=False)
        names += out.stdout.splitlines()
    return [n for n in dict.fromkeys(names) if (ROOT / n).exists()][:limit]


def tidy(context):
    """clang-tidy on host sources: the files that changed last, all of src/ with --full or --suite tidy, since on two
    cores one file takes two seconds. What was clean with the same headers and settings is not looked at again."""
    if not (BUILD / "release" / "compile_commands.json").exists():
        return skip("no compile commands")
    headers = hashlib.sha256()
    for name in [*tracked(".hpp", ".h", ".cuh"), ".clang-tidy"]:
        headers.update(name.encode() + (ROOT / name).read_bytes())
    stamps = BUILD / "tidy"
    stamps.mkdir(parents=True, exist_ok=True)
    todo = []
    chosen = [n for n in tracked(".cpp") if n.startswith("src/")]
    note = f"all {len(chosen)} files"
    if not context.thorough:
        recent = recently_changed(TIDY_FILES)
        note = f"the {len(recent)} files of {len(chosen)} that changed last; all with --full"
        chosen = recent
    for name in chosen:
        key = hashlib.sha256(headers.digest() + (ROOT / name).read_bytes()).hexdigest()[:24]
        stamp = stamps / f"{name.replace('/', '_')}.{key}"
        if not stamp.exists():
            todo.append((name, stamp))

    def one(item):
        name, stamp = item
        status = context.run(["clang-tidy", "-p", BUILD / "release", "--quiet",
                              "--extra-arg=-Wno-unknown-warning-option", name],
                             f"tidy-{name.replace('/', '_')}")
        if status == 0:
            for old in stamps.glob(f"{name.replace('/', '_')}.*"):
                old.unlink()
            stamp.touch()
        return status

    with ThreadPoolExecutor(CORES) as pool:
        bad = sum(1 for status in pool.map(one, todo) if status)
    return Result(failed=bad, note=note) if bad else Result(passed=1, note=note)


def cuda(context):
    """Compiles the CUDA code for one architecture; the tests of the generated PTX need no GPU, others only run with one."""
    if not (shutil.which("nvcc") or os.path.exists("/usr/local/cuda/bin/nvcc")):
        return skip("no nvcc")
    failed = built(context, "cuda", "marrow", "marrow_cuda_tests")
    if failed:
        return failed
    result = Result(passed=1) + ctest(context, "cuda", "cuda")
    if _has_gpu():
        return result + ctest(context, "cuda", "gpu")
    return result + Result(note="GPU tests not run: no GPU")


def _has_gpu():
    smi = shutil.which("nvidia-smi")
    return bool(smi) and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def cuda_full(context):
    if not (shutil.which("nvcc") or os.path.exists("/usr/local/cuda/bin/nvcc")):
        return skip("no nvcc")
    failed = built(context, "cuda", "marrow", "marrow_cuda_tests", extra=(f"-DMARROW_CUDA_ARCH={CUDA_FULL}",),
                   folder="cuda-full")
    return failed or Result(passed=1, note=CUDA_FULL)


def docs(context):
    script = ROOT / "scripts" / "docs_blocks.py"
    result = pytest(context, "tests/docs", "docs")
    report = LOGS / "docs.count"
    report.unlink(missing_ok=True)
    status = context.run([sys.executable, script, "--report", report], "docs", env=test_environment())
    if report.exists():
        passed, failed = map(int, report.read_text().split())
        result += Result(passed=passed, failed=failed)
    if status and not result.failed:
        result += Result(failed=1, note="docs_blocks.py failed")
    return result if result.passed + result.failed else skip("no code block in docs yet")


def coverage(context):
    """Lines of src/ and include/ that the unit, conformance and ep suites reach, by folder; which ones they miss is in
    build/test/coverage.txt. Ranks that are processes of their own count when they end by themselves."""
    # -O1: at -O0 its counters, which threads share, make some tests four times as slow as they may be.
    failed = built(context, "debug", "marrow_tests", folder="coverage",
                   extra=("-DMARROW_COVERAGE=ON", *FAST_DEBUG))
    if failed:
        return failed
    for old in (BUILD / "coverage").rglob("*.gcda"):
        old.unlink()
    result = Result()
    for label in ("unit", "conformance", "ep"):
        result += ctest(context, "coverage", label, name=f"coverage-{label}")
    summary = LOGS / "coverage.json"
    summary.unlink(missing_ok=True)
    status = context.run(["gcovr", "-r", ROOT, "-j", str(CORES), "--filter", "src/", "--filter", "include/",
                          "--exclude-throw-branches", "--txt", LOGS / "coverage.txt",
                          "--html", LOGS / "coverage.html", "--json-summary", summary, BUILD / "coverage"], "coverage")
    if status or not summary.exists():
        return result + Result(failed=1, note="gcovr failed")
    lines = {}
    for file in json.loads(summary.read_text())["files"]:
        sums = lines.setdefault(os.path.dirname(file["filename"]), [0, 0])
        sums[0] += file["line_covered"]
        sums[1] += file["line_total"]
    lines["all"] = [sum(each) for each in zip(*lines.values())] if lines else [0, 0]
    for folder, (covered, total) in sorted(lines.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"   {folder:<32} {covered:>6} of {total:>6} lines  {100 * covered / max(1, total):5.1f} %")
    if lines["all"][0] == 0:
        return result + Result(failed=1, note="no line was counted")
    return result + Result(note="build/test/coverage.txt, coverage.html")


def soak(context):
    seconds = os.environ.setdefault("MARROW_SOAK_SECONDS", "300")
    if not (BUILD / "release" / "CTestTestfile.cmake").exists():
        return skip("no build")
    end, result = time.monotonic() + float(seconds), Result()
    seed = int(time.time()) % 1000000 * 1000
    while (left := end - time.monotonic()) > 1 or result.passed + result.failed == 0:
        seed += 1
        status = context.run([BUILD / "release" / "tests" / "marrow_conformance", "--matrix", "pairwise",
                              "--matrix-seed", str(seed), "--seed", str(seed), "--least", "1",
                              "--seconds", f"{max(1.0, left):.0f}", "--totals"], f"soak-{seed}",
                             limit=max(1.0, left) + 120)
        result += Result(passed=int(status == 0), failed=int(status != 0))
    result.note = f"conformance, another matrix and other seeds each time; the last seed was {seed}"
    return result


def fuzz(context):
    """Every target for 8 s, as many at a time as there are cores; with --fuzz for 450 s (four of them: half an
    hour of a core). What a run found interesting is where the next one starts."""
    seconds = float(os.environ.get("MARROW_FUZZ_SECONDS", "450" if context.long_fuzz else "8"))
    targets = sorted(p.stem for p in (ROOT / "tests" / "fuzz").glob("*_fuzz.cpp"))
    if not shutil.which("clang++"):
        return skip("no clang++ (libFuzzer)")
    # -O1: ten times the runs of a debug build. Warnings are g++'s affair.
    failed = built(context, "debug", "marrow_fuzz", folder="fuzz",
                   extra=("-DCMAKE_CXX_COMPILER=clang++", "-DMARROW_FUZZ=ON", "-DMARROW_WERROR=OFF", *FAST_DEBUG))
    if failed:
        return failed

    def one(target):
        corpus = BUILD / "fuzz" / "corpus" / target
        corpus.mkdir(parents=True, exist_ok=True)
        return context.run([BUILD / "fuzz" / "tests" / target, f"-max_total_time={seconds:.0f}", "-timeout=10",
                            "-print_final_stats=1", f"-artifact_prefix={LOGS}/{target}-", corpus],
                           f"fuzz-{target}", limit=seconds + 60)

    with ThreadPoolExecutor(CORES) as pool:
        statuses = list(pool.map(one, targets))
    bad = sum(1 for status in statuses if status)
    return Result(passed=len(targets) - bad, failed=bad, note=f"{seconds:.0f} s each")


NEEDS = ("build",)
ALL = [
    Suite("format", "clang-format agrees with every source", format_check),
    Suite("shell", "shellcheck of the scripts", shell_check),
    Suite("tools", "layering, licence headers, options of ./demo and ./test", labelled("tools")),
    Suite("build", "release build with all tests", build_release),
    Suite("unit", "one part at a time", labelled("unit"), needs=NEEDS),
    Suite("conformance", "the contract of every operation, over the paths", labelled("conformance"), needs=NEEDS),
    Suite("litmus", "memory-order litmus tests", labelled("litmus"), needs=NEEDS),
    Suite("multiprocess", "ranks as processes, launchers, killed ranks", labelled("multiprocess"), needs=NEEDS),
    Suite("ep", "MoE dispatch and combine, case by case, over every path", labelled("ep"), needs=NEEDS),
    Suite("multihost", "three hosts as network namespaces: mpirun, cables that are pulled", labelled("multihost"),
          needs=NEEDS),
    Suite("softroce", "the verbs network on a real kernel's soft-RoCE, in a guest", labelled("softroce"), needs=NEEDS),
    Suite("cli", "the command `marrow`", labelled("cli"), needs=NEEDS),
    Suite("install", "find_package, pkg-config, uninstall", labelled("install"), needs=NEEDS),
    Suite("examples", "each example against an installed Marrow", examples.run, needs=NEEDS),
    Suite("docs", "code blocks compile, generated pages are up to date", docs, needs=NEEDS),
    Suite("tidy", "clang-tidy of the host code", tidy, needs=NEEDS),
    Suite("asan", "AddressSanitizer and UBSan", sanitizer("asan")),
    Suite("tsan", "ThreadSanitizer", sanitizer("tsan")),
    Suite("fuzz", "bytes from outside: WQEs, commands, keys, bootstrap frames (libFuzzer)", fuzz),
    Suite("cuda", "CUDA code for one architecture, tests of its PTX", cuda),
    Suite("cuda-full", f"CUDA code for {CUDA_FULL}", cuda_full, when="full"),
    Suite("clone", "./demo and ./test on a clean clone, as a non-root user, offline", clean_clone.run, when="full"),
    Suite("coverage", "line coverage", coverage, when="coverage"),
    Suite("soak", "long random runs", soak, when="soak", needs=NEEDS),
]
