# SPDX-License-Identifier: Apache-2.0
"""Every source names its licence first, and every header is included once."""
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (".cpp", ".hpp", ".h", ".cuh", ".cu", ".py", ".cmake", "CMakeLists.txt")


def files():
    listing = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                             capture_output=True, text=True, check=False)
    names = listing.stdout.splitlines() if listing.returncode == 0 else [
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    return [n for n in names if n.endswith(SOURCES) and not n.startswith("build/") and (ROOT / n).exists()]


def test_every_source_starts_with_its_licence():
    missing = [n for n in files()
               if "SPDX-License-Identifier: Apache-2.0" not in "".join((ROOT / n).open().readlines()[:2])]
    assert missing == []


def test_every_header_is_included_once():
    """By #pragma once, or by a guard where the header is C."""
    missing = [n for n in files() if n.endswith((".hpp", ".cuh", ".h")) and n.startswith(("include/", "src/"))
               and not any(guard in (ROOT / n).read_text() for guard in ("#pragma once", "#ifndef MARROW_"))]
    assert missing == []


def test_cmake_splits_no_shell_command():
    """A ; inside a CMake string ends a list's element: what follows it never reaches the shell."""
    split = [f"{n}: {line.strip()}" for n in files() if n.endswith((".cmake", "CMakeLists.txt"))
             for line in (ROOT / n).read_text().splitlines() if re.search(r'\bsh -c "[^"]*(?<!\\);', line)]
    assert split == []


def test_files_stay_small():
    """Past 500 lines a file is asking to be two; past 700 it must be."""
    long = {n: c for n in files() if (c := len((ROOT / n).read_text().splitlines())) > 700}
    assert long == {}
