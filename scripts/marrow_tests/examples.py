# SPDX-License-Identifier: Apache-2.0
"""Builds every example as a user would: a CMake project of its own that finds an installed Marrow."""
import shutil

from .harness import BUILD, CORES, ROOT, LOGS, Result, skip, junit


def stage(context):
    """Installs build/release into build/stage. Returns the prefix or None."""
    prefix = BUILD / "stage"
    shutil.rmtree(prefix, ignore_errors=True)
    status = context.run(["cmake", "--install", BUILD / "release", "--prefix", prefix], "stage")
    return None if status else prefix


def run(context):
    folders = sorted(p.parent for p in (ROOT / "examples").glob("*/CMakeLists.txt"))
    if not folders:
        return skip("no example yet")
    prefix = stage(context)
    if prefix is None:
        return Result(failed=1, note="install failed")
    result = Result()
    for folder in folders:
        result += one(context, folder, prefix)
    return result


def one(context, folder, prefix):
    tree = BUILD / "examples" / folder.name
    configure = ["cmake", "-S", folder, "-B", tree, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"]
    if shutil.which("ninja") and not (tree / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    if shutil.which("ccache"):
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    name = f"example-{folder.name}"
    if context.run(configure, f"{name}-configure"):
        return Result(failed=1, note=f"{folder.name}: cmake failed")
    if context.run(["cmake", "--build", tree, "--parallel", str(CORES)], f"{name}-build"):
        return Result(failed=1, note=f"{folder.name}: the build failed")
    report = LOGS / f"{name}.xml"
    report.unlink(missing_ok=True)
    status = context.run(["ctest", "--test-dir", tree, "--output-on-failure", "--no-tests=error", "--timeout", "60",
                          "--output-junit", report], name)
    result = junit(report) if report.exists() else Result()
    if status and not result.failed:
        result += Result(failed=1, note=f"{folder.name}: ctest failed (each example registers a test)")
    return result
