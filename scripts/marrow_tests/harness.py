# SPDX-License-Identifier: Apache-2.0
"""Running a command within the deadline, and reading what ctest, GoogleTest and pytest counted."""
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "test"
CORES = os.cpu_count() or 2
TAIL_LINES = 60


class OutOfTime(Exception):
    """The time limit of the whole run passed inside a step."""


@dataclasses.dataclass
class Result:
    """What a suite counted. A suite with nothing to run says why in its note."""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""

    def __add__(self, other):
        note = "; ".join(n for n in (self.note, other.note) if n)
        return Result(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped, note)


def skip(reason):
    return Result(skipped=1, note=f"skipped: {reason}")


@dataclasses.dataclass
class Context:
    deadline: float
    full: bool = False
    thorough: bool = False  # --full, or the suite was asked for by name
    long_fuzz: bool = False

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, command, log, env=None, cwd=ROOT, limit=None, quiet=False):
        """Runs a command with its output in build/test/<log>.log. Returns the exit status; the output's tail is
        shown when it is not 0. Past the limit the whole process group is ended and OutOfTime raised."""
        LOGS.mkdir(parents=True, exist_ok=True)
        path = LOGS / f"{log}.log"
        allowed = max(1.0, self.left() if limit is None else min(limit, self.left()))
        with open(path, "wb") as out:
            process = subprocess.Popen([str(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})},
                                       stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                status = process.wait(timeout=allowed)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    show_tail(path)
                    raise OutOfTime(f"'{log}' did not end within {allowed:.0f} s") from None
                raise
        if status != 0 and not quiet:
            show_tail(path)
        return status


def show_tail(path):
    lines = path.read_text(errors="replace").splitlines()
    wanted = [i for i, line in enumerate(lines) if " error: " in line or "FAILED" in line][:1]
    first = max(0, min(len(lines) - TAIL_LINES, wanted[0] - 2 if wanted else len(lines)))
    print(f"   --- {path.relative_to(ROOT)}", flush=True)
    for line in lines[first:first + TAIL_LINES]:
        print(f"   | {line}", flush=True)


def configure(context, preset, *extra, folder=None):
    """Configures a preset into build/<folder or preset>; Ninja for a new folder."""
    folder = BUILD / (folder or preset)
    command = ["cmake", "--preset", preset, "-S", ROOT, "-B", folder, *extra]
    if not (folder / "CMakeCache.txt").exists() and shutil.which("ninja"):
        command[3:3] = ["-G", "Ninja"]
    command.append(f"-DPython3_EXECUTABLE={sys.executable}")
    return context.run(command, f"configure-{folder.name}")


def build(context, folder, *targets):
    command = ["cmake", "--build", BUILD / folder, "--parallel", str(CORES)]
    if targets:
        command += ["--target", *targets]
    return context.run(command, f"build-{folder}")


def ctest(context, folder, label, name=None):
    """Runs the ctests with this label. A GoogleTest executable counts as its cases,
    a program that closes with its own counts as those, any other ctest as one. The
    labels full and soak mark long runs: full runs with --full, soak only in its own suite."""
    name = name or label
    tree = BUILD / folder
    if not (tree / "CTestTestfile.cmake").exists():
        return Result()
    report = LOGS / f"ctest-{name}.xml"
    LOGS.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    cases = tree / "gtest"
    shutil.rmtree(cases, ignore_errors=True)
    command = ["ctest", "--test-dir", tree, "--output-on-failure", "--no-tests=ignore", "--timeout", "60",
               "-j", str(CORES), "--output-junit", report]
    if label:
        command += ["-L", f"^{label}$"]
    hidden = [long for long in ("full", "soak") if long != label and not (long == "full" and context.full)]
    command += ["-LE", f"^({'|'.join(hidden)})$"]
    status = context.run(command, f"ctest-{name}")
    if not report.exists():
        return Result(failed=1, note="ctest wrote no report") if status else Result()
    total = Result()
    for case in xml.parse(report).getroot().iter("testcase"):
        total += _one_ctest(case, cases / f"{case.get('name')}.xml")
    if status and not total.failed:
        total += Result(failed=1, note="ctest failed")
    return total


def _one_ctest(case, gtest_report):
    outcome = case.get("status")
    if outcome in ("notrun", "disabled"):
        message = case.find("skipped")
        reason = message.get("message", "") if message is not None else ""
        bad = outcome == "notrun" and "SKIP" not in reason.upper()
        why = re.search(r"^SKIPPED: (.*)$", case.findtext("system-out") or "", re.M)
        return Result(failed=int(bad), skipped=int(not bad), note=f"skipped: {why.group(1)}" if why else "")
    failed = outcome == "fail" or case.find("failure") is not None
    if gtest_report.exists():
        result = junit(gtest_report)
    else:
        result = _own_count(case.findtext("system-out") or "") or Result(passed=int(not failed), failed=int(failed))
    if not failed and result.failed:  # a planted bug, and the test says it will fail
        return Result(passed=1)
    if failed and not result.failed:  # crashed, leaked or ran out of time after its cases
        result.failed += 1
    return result


def _own_count(output):
    """The counts of a program that closes with 'N passed, N failed', or None."""
    found = re.findall(r"^\s*(\d+) passed, (\d+) failed(?:, (\d+) skipped)?", output, re.M)
    return Result(*(int(n or 0) for n in found[-1])) if found else None


def junit(path):
    """Counts of a JUnit file as GoogleTest and pytest write it."""
    result = Result()
    try:
        root = xml.parse(path).getroot()
    except xml.ParseError:
        return Result(failed=1, note=f"{path.name} is cut off")
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            result.skipped += 1
        elif case.get("status") != "notrun":
            result.passed += 1
    return result


def pytest(context, folder, name, env=None):
    """Runs the pytest files of a folder, if there are any; each test has 60 s unless it says otherwise."""
    if not any((ROOT / folder).glob("test_*.py")):
        return Result()
    report = LOGS / f"pytest-{name}.xml"
    LOGS.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60",
               "--rootdir", ROOT, f"--junitxml={report}", ROOT / folder]
    status = context.run(command, f"pytest-{name}", env={**test_environment(), **(env or {})})
    if not report.exists():
        return Result(failed=1, note="pytest wrote no report")
    result = junit(report)
    if status not in (0, 5) and not result.failed:
        result += Result(failed=1, note=f"pytest ended with {status}")
    return result


def test_environment():
    """What a test outside ctest may rely on."""
    return {"MARROW_TEST_ROOT": str(ROOT), "MARROW_TEST_BUILD": str(BUILD / "release"),
            "MARROW_TEST_CLI": str(BUILD / "release" / "bin" / "marrow"), "PYTHONDONTWRITEBYTECODE": "1"}


def tracked(*suffixes):
    """The project's own files with one of these suffixes: what git tracks or would track."""
    listing = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                             capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:  # a tarball
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")
                 if p.is_file() and p.relative_to(ROOT).parts[0] not in ("build", ".git")]
    return sorted(n for n in names if n.endswith(suffixes) and (ROOT / n).exists())
