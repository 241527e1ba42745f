# SPDX-License-Identifier: Apache-2.0
"""./demo and ./test: their options, and what they say on a machine that lacks packages.

A fake PATH holds links to the harmless tools only, so nothing can be found, installed or built.
"""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HARMLESS = ["bash", "dirname", "readlink", "cat", "sed", "head", "id", "nproc", "env", "mkdir", "rm", "mktemp", "git"]


def run(command, path=None, cwd=ROOT):
    env = {"PATH": path or os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
    return subprocess.run([shutil.which("bash"), *command], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture
def bare(tmp_path):
    """A PATH with a shell's everyday tools and neither compiler, CMake nor package manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in HARMLESS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return folder


@pytest.fixture
def clone(tmp_path):
    """The two commands alone: whatever they do, the real tree is safe."""
    folder = tmp_path / "tree"
    (folder / "scripts").mkdir(parents=True)
    for name in ("demo", "test", "scripts/packages.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def fake(folder, name, body):
    tool = folder / name
    tool.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize("command", ["./demo", "./test"])
def test_help_names_every_option_and_ends_well(command):
    result = run([command, "--help"])
    assert result.returncode == 0
    wanted = ["--clean"] if command == "./demo" else ["--full", "--coverage", "--soak", "--fuzz", "--docs", "--suite"]
    assert all(option in result.stdout for option in wanted)


@pytest.mark.parametrize("command", ["demo", "test"])
def test_missing_packages_give_one_command_and_status_2(bare, clone, command):
    result = run([f"./{command}"], path=str(bare), cwd=clone)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if "apt-get install" in line]
    assert len(lines) == 1 and "g++" in lines[0] and "cmake" in lines[0]
    assert not (clone / "build").exists()


def test_only_what_is_missing_is_asked_for(bare, clone):
    fake(bare, "c++", "exit 0")
    fake(bare, "make", "exit 0")
    result = run(["./demo"], path=str(bare), cwd=clone)
    assert result.returncode == 2
    assert "install -y cmake" in result.stderr and "g++" not in result.stderr


def test_an_old_cmake_counts_as_missing(bare, clone):
    fake(bare, "c++", "exit 0")
    fake(bare, "make", "exit 0")
    fake(bare, "cmake", "echo cmake version 3.18.4")
    result = run(["./demo"], path=str(bare), cwd=clone)
    assert result.returncode == 2 and "install -y cmake" in result.stderr


def test_no_registry_means_no_installation(bare, clone, tmp_path):
    """apt-get is there, but names no registry: it must not be asked to install."""
    fake(bare, "apt-get", f'echo "$*" >> {tmp_path}/calls')
    result = run(["./demo"], path=str(bare), cwd=clone)
    assert result.returncode == 2 and "apt-get install" in result.stderr
    calls = tmp_path / "calls"
    assert not calls.exists() or "install" not in calls.read_text()


def test_unknown_options_of_test_are_refused():
    result = run(["./test", "--no-such-thing"])
    assert result.returncode == 2 and "--no-such-thing" in result.stderr and "--help" in result.stderr


def test_suite_needs_a_name():
    assert run(["./test", "--suite"]).returncode == 2


def test_an_unknown_suite_lists_the_known_ones():
    result = subprocess.run([sys.executable, "-B", ROOT / "scripts/run_tests.py", "--suite", "nonesuch"],
                            capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 2 and "nonesuch" in result.stderr and "conformance" in result.stderr


def test_clean_removes_the_build_folder_only(clone):
    (clone / "build" / "x").mkdir(parents=True)
    result = run(["./demo", "--clean"], cwd=clone)
    assert result.returncode == 0
    assert not (clone / "build").exists() and (clone / "demo").exists()


def test_options_go_to_the_demo_itself(bare, clone):
    """With a build that does nothing, the options reach `marrow demo` unchanged, in order."""
    fake(bare, "c++", "exit 0")
    fake(bare, "make", "exit 0")
    fake(bare, "cmake", "[ \"$1\" = --version ] && echo cmake version 3.25.1; exit 0")
    tool = clone / "build" / "demo" / "bin"
    tool.mkdir(parents=True)
    fake(tool, "marrow", 'printf "[%s]" "$@"')
    result = run(["./demo", "--routing", "a file", "-n", "3"], path=str(bare), cwd=clone)
    assert result.stdout.endswith("[demo][--routing][a file][-n][3]"), result.stderr


def test_a_failed_build_shows_its_error_and_the_log(bare, clone):
    fake(bare, "c++", "exit 0")
    fake(bare, "make", "exit 0")
    for tool in ("tail", "grep"):
        (bare / tool).symlink_to(shutil.which(tool))
    fake(bare, "cmake", 'case $1 in --version) echo cmake version 3.25.1;; --build) echo "a.cpp:1: error: no"; exit 1;; esac')
    result = run(["./demo"], path=str(bare), cwd=clone)
    assert result.returncode == 1
    assert "error: no" in result.stderr and "build/demo/demo.log" in result.stderr
