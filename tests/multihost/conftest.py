# SPDX-License-Identifier: Apache-2.0
"""Three hosts for all tests of this folder, or a visible skip. MARROW_TEST_REQUIRE=netns makes a skip a failure."""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from hosts import Hosts, NoHosts  # noqa: E402

ROOT = pathlib.Path(os.environ.get("MARROW_TEST_ROOT", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("MARROW_TEST_BUILD", ROOT / "build" / "release"))


def cannot(reason):
    """Skips, unless this machine has promised to be able to."""
    if "netns" in os.environ.get("MARROW_TEST_REQUIRE", "").split(","):
        pytest.fail(f"MARROW_TEST_REQUIRE names netns, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts():
    try:
        made = Hosts()
    except NoHosts as error:
        cannot(f"no network namespaces: {error}")
    listed = subprocess.run([BUILD / "bin" / "marrow", "info"], capture_output=True, text=True, check=False, timeout=50)
    if "libfabric" not in listed.stdout:
        made.close()
        cannot("this build has no libfabric (libfabric-dev)")
    with made:
        yield made


@pytest.fixture(scope="session")
def mpirun():
    if not shutil.which("mpirun"):
        cannot("no mpirun (openmpi-bin)")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        cannot(f"mpirun is not Open MPI: {version[:60]!r}")
    return "mpirun"


@pytest.fixture
def plugged(hosts):
    """All cables in their sockets, before and after."""
    for i in range(hosts.count):
        hosts.link(i, "up")
    yield hosts
    for i in range(hosts.count):
        hosts.link(i, "up")
