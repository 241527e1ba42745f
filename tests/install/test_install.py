# SPDX-License-Identifier: Apache-2.0
"""An installed Marrow is found by CMake and pkg-config, may be moved, and can be removed without a trace."""
import os
import pathlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = pathlib.Path(os.environ.get("MARROW_TEST_ROOT", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("MARROW_TEST_BUILD", ROOT / "build" / "release"))
WORK = ROOT / "build" / "install-test"
HERE = pathlib.Path(__file__).resolve().parent


def run(*command, timeout=55, **kwargs):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=timeout,
                            **kwargs)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def generator():
    return ["-G", "Ninja"] if shutil.which("ninja") else []


@pytest.fixture(scope="module")
def prefix():
    """Marrow installed under a folder that is then renamed: paths that were baked in would break."""
    shutil.rmtree(WORK, ignore_errors=True)
    run("cmake", "--install", BUILD, "--prefix", WORK / "first")
    (WORK / "first").rename(WORK / "moved")
    return WORK / "moved"


def consume(package, tree):
    run("cmake", "-S", HERE / "consumer", "-B", tree, *generator(), package)
    run("cmake", "--build", tree)
    assert run(tree / "consumer").splitlines()[-1] == "ok"


def test_find_package_from_the_install_tree(prefix):
    consume(f"-DCMAKE_PREFIX_PATH={prefix}", WORK / "by-cmake")


def test_find_package_from_the_build_tree(prefix):
    consume(f"-Dmarrow_DIR={BUILD}", WORK / "by-build-tree")


def test_another_minor_version_is_refused(prefix):
    tree = WORK / "version"
    tree.mkdir(exist_ok=True)
    (tree / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.22)\nproject(v LANGUAGES CXX)\n"
                                         "find_package(marrow 0.99 CONFIG REQUIRED)\n")
    result = subprocess.run(["cmake", "-S", tree, "-B", tree / "b", f"-DCMAKE_PREFIX_PATH={prefix}"],
                            capture_output=True, text=True, check=False, timeout=55)
    assert result.returncode != 0 and "0.99" in result.stderr


def test_pkg_config(prefix):
    pc = next(prefix.rglob("marrow.pc"))
    env = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
    flags = run("pkg-config", "--cflags", "--libs", "marrow", env=env).split()
    lib = run("pkg-config", "--variable=libdir", "marrow", env=env).strip()
    target = WORK / "by-pkg-config"
    run("c++", "-std=c++20", HERE / "consumer" / "main.cpp", "-o", target, *flags, f"-Wl,-rpath,{lib}")
    assert run(target).splitlines()[-1] == "ok"


def test_the_installed_command_runs_from_its_new_place(prefix):
    command = prefix / "bin" / "marrow"
    if not command.exists():
        pytest.skip("this build has no command")
    run(command, "--help")


def test_only_marked_symbols_are_exported(prefix):
    """Hidden by default: what another library could bind to is in namespace marrow or an extern "C" of ours."""
    library = next(prefix.rglob("libmarrow.so"))
    names = [line.split()[-1] for line in run("nm", "-D", "--defined-only", "--no-demangle", library).splitlines()]
    strangers = [n for n in names if "marrow" not in n.lower() and not n.startswith(("_ZTI", "_ZTS", "_ZTV"))]
    inside = [f"_ZN6marrow{len(part)}{part}" for part in ("base", "bootstrap", "memory", "topology", "gda", "proxy",
                                                          "networks", "softnic")]
    internal = [n for n in names if n.startswith(tuple(inside))]
    assert strangers == [] and internal == []


def test_replacement_libraries_are_apart_and_find_each_other(prefix):
    """libibverbs.so.1 and libmlx5.so.1 of softnic: in their own folder, with versions, and no name of the real ones
    anywhere else."""
    folder = next(p for p in prefix.rglob("marrow/softnic") if p.is_dir() and p.parent.parent.name != "include")
    assert sorted(p.name for p in folder.iterdir()) == ["libibverbs.so.1", "libmlx5.so.1"]
    assert [p for p in prefix.rglob("lib*.so*") if p.parent != folder and "marrow" not in p.name] == []
    ibverbs = run("readelf", "--wide", "--dyn-syms", folder / "libibverbs.so.1")
    for name in ("ibv_get_device_list@@IBVERBS_1.1", "ibv_reg_mr_iova2@@IBVERBS_1.8", "ibv_reg_dmabuf_mr@@IBVERBS_1.12"):
        assert name in ibverbs
    assert "_ZN6marrow" not in ibverbs
    assert "[$ORIGIN]" in run("readelf", "-d", folder / "libmlx5.so.1")
    run("python3", "-c", "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); n = ctypes.c_int(); "
        "d = ctypes.CDLL(sys.argv[1].replace('mlx5', 'ibverbs')); d.ibv_get_device_list.restype = ctypes.c_void_p; "
        "assert d.ibv_get_device_list(ctypes.byref(n)) and n.value == 1", folder / "libmlx5.so.1")


def test_soname_is_the_major_version(prefix):
    library = next(prefix.rglob("libmarrow.so"))
    assert "libmarrow.so.0]" in run("readelf", "-d", library)


def test_every_public_header_compiles_alone(prefix):
    """detail/ and platform/ hold bodies of the contract headers and may lean on them."""
    include = prefix / "include"
    headers = sorted(p.relative_to(include) for p in include.rglob("*")
                     if p.suffix in (".h", ".hpp", ".cuh") and p.parent.name not in ("detail", "platform"))
    assert headers
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", f"-I{include}"]

    def compile_one(header):
        return subprocess.run(["c++", *flags, "-include", header, "/dev/null"], capture_output=True, text=True,
                              check=False, timeout=55)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = zip(headers, pool.map(compile_one, headers))
        bad = {str(h): r.stderr[:500] for h, r in results if r.returncode}
    assert bad == {}


def test_a_parent_project_is_left_as_it_was(prefix):
    tree = WORK / "parent"
    run("cmake", "-S", HERE / "parent", "-B", tree, *generator(), f"-DMARROW_ROOT={ROOT}", "-DMARROW_CUDA=OFF",
        "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", tree, "--target", "own")


def test_uninstall_leaves_nothing(prefix):
    manifest = BUILD / "install_manifest.txt"
    target = WORK / "to-remove"
    run("cmake", "--install", BUILD, "--prefix", target)
    files = [pathlib.Path(line) for line in manifest.read_text().splitlines()]
    assert files and all(f.exists() for f in files)
    run("cmake", "--build", BUILD, "--target", "uninstall")
    assert [str(p) for p in target.rglob("*") if not p.is_dir()] == []
    assert not any(p.name == "marrow" for p in target.rglob("*"))


@pytest.mark.timeout(600)
def test_the_static_library_links_alone():
    """libmarrow.a from an install: find_package brings what it needs. ccache has the objects of the release build."""
    tree, target = WORK / "static", WORK / "static-prefix"
    run("cmake", "-S", ROOT, "-B", tree, *generator(), "-DCMAKE_BUILD_TYPE=Release", "-DMARROW_CUDA=OFF",
        "-DMARROW_SHARED=OFF", "-DMARROW_TESTS=OFF")
    run("cmake", "--build", tree, "--target", "marrow", timeout=580)
    run("cmake", "--install", tree, "--prefix", target, "--component", "library")
    assert list(target.rglob("libmarrow.a")) and not list(target.rglob("libmarrow.so*"))
    consume(f"-DCMAKE_PREFIX_PATH={target}", WORK / "by-static")
