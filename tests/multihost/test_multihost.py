# SPDX-License-Identifier: Apache-2.0
"""Three hosts on Ethernet: the contract, the demo, and what ranks see of cables, processes and disks that fail. The proxy path
over libfabric's tcp; ranks of different hosts share no memory."""
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import BUILD, cannot

ROLES = BUILD / "tests" / "multiprocess_liveness_test"
SECRET = "a secret of more than sixteen bytes"


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o777)
    return tmp_path


def under_mpirun(hosts, mpirun, folder, words, environment=None, timeout=50):
    """One rank a host. Returns the finished process."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    variables = {"MARROW_RENDEZVOUS": f"tcp://{hosts.address(0)}:{4700 + os.getpid() % 200}",
                 "MARROW_SECRET_FILE": str(secret), **(environment or {})}
    agent = hosts.agent(folder / "agent")
    where = ",".join(f"{hosts.address(i)}:1" for i in range(hosts.count))
    command = [mpirun, "--allow-run-as-root", "--mca", "plm_rsh_agent", agent, "--mca", "btl_base_warn_component_unused",
               "0", "--host", where, "-n", str(hosts.count)]
    for name in variables:
        command += ["-x", name]
    return subprocess.run(hosts.command(0, [*command, *words]), capture_output=True, text=True, check=False,
                          timeout=timeout, env={**os.environ, **variables})


class Ranks:
    """A role of multiprocess_liveness_test, one rank a host."""

    def __init__(self, hosts, folder, role, environment=None):
        self.folder = folder
        self.processes = []
        for rank in range(hosts.count):
            with open(folder / f"{rank}.log", "w", encoding="utf-8") as log:
                words = [ROLES, "--role", role, rank, hosts.count, folder, "proxy"]
                self.processes.append(subprocess.Popen(
                    hosts.command(rank, words), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, "MARROW_BOOTSTRAP_TIMEOUT": "20s", **(environment or {})}))

    def hear(self, rank, what, seconds=20):
        """The text of what the rank said."""
        path = self.folder / f"{rank}.{what}"
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"rank {rank} did not say {what}\n{self.log(rank)}"
            time.sleep(0.01)
        return path.read_text()

    def result(self, rank, seconds=45):
        self.processes[rank].wait(seconds)
        return self.hear(rank, "result", 1)

    def log(self, rank):
        return (self.folder / f"{rank}.log").read_text()[-4000:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def test_conformance_under_mpirun(hosts, mpirun, folder):
    """Rows of the contract suite, the same ones on all three ranks, from a file."""
    suite = BUILD / "tests" / "marrow_conformance"
    rows = subprocess.run([suite, "--rows", "--matrix", "pairwise", "--path", "proxy", "--network", "libfabric", "--ranks",
                           "3", "--as", "processes", "--lanes", "1", "--seed", "1"], capture_output=True, text=True,
                          check=True).stdout.splitlines()
    # One communicator serves many rows: those that ask for the same stand together.
    kept = sorted(rows, key=lambda row: re.sub(r"--(?!depth|lsa-size)\S+ \S+", "", row))[:40]
    (folder / "rows").write_text("\n".join(kept) + "\n")
    done = under_mpirun(hosts, mpirun, folder, [
        "sh", "-c", f"MARROW_CPU_LANES=1 exec {suite} --worker $OMPI_COMM_WORLD_RANK --folder {folder} < {folder}/rows"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("well") == 3 * len(kept) and len(kept) > 20, done.stdout[-2000:]


def test_demo_under_mpirun(hosts, mpirun, folder):
    done = under_mpirun(hosts, mpirun, folder, [BUILD / "bin" / "marrow", "demo", "--path", "proxy", "--tokens", "256"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"proxy +libfabric +yes", done.stdout), done.stdout


def test_no_signal_is_lost_early_or_counted_twice(hosts, mpirun, folder):
    """libfabric's tcp under a network that reorders, delays, loses and repeats by seed: each rank floods the others."""
    puts = os.environ.get("MARROW_TEST_FLOOD", "50000")
    rank = [BUILD / "tests" / "proxy_unordered_test", "--gtest_also_run_disabled_tests", "--gtest_filter=UnorderedHosts.*",
            "--gtest_color=no"]
    done = under_mpirun(hosts, mpirun, folder, rank, {"MARROW_TEST_FLOOD": puts})
    assert done.returncode == 0 and done.stdout.count("[  PASSED  ] 1 test") == 3, done.stdout[-3000:] + done.stderr[-2000:]
    print(re.search(r"\d+ puts with signals.*", done.stdout)[0])


@pytest.mark.parametrize("choice", ["ipv6", "interface", "nic"])
def test_choice_of_interface(hosts, mpirun, folder, choice):
    """IPv6 where there is no IPv4; MARROW_SOCKET_IFNAME; MARROW_NIC."""
    environment = {"MARROW_DEBUG": "INFO", "MARROW_NETWORK": "libfabric"}
    if choice == "interface":
        environment["MARROW_SOCKET_IFNAME"] = "=wire0"
    elif choice == "nic":
        environment["MARROW_NIC"] = "wire0"
    else:
        if not hosts.has_ipv6:
            cannot("no IPv6 in these namespaces")
        environment["MARROW_NETWORK"] = "libfabric?family=6"
    done = under_mpirun(hosts, mpirun, folder,
                        [BUILD / "bin" / "marrow", "demo", "--path", "proxy", "--tokens", "32"], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = r"\[fd99::1\]:\d+" if choice == "ipv6" else r"10\.99\.0\.1:\d+"
    assert re.search(rf"libfabric: tcp\S* on wire0 at {wanted}", done.stderr), done.stderr


def test_unknown_nic_lists_the_known_ones(hosts):
    done = subprocess.run(hosts.command(0, [BUILD / "bin" / "marrow", "demo", "--path", "proxy", "--ranks", "2", "--tokens",
                                            "32", "--network", "libfabric"]),
                          capture_output=True, text=True, check=False, timeout=30, env={**os.environ, "MARROW_NIC": "ib7"})
    assert done.returncode != 0
    assert "MARROW_NIC=ib7" in done.stderr and "wire0" in done.stderr, done.stderr


STRANGER = """
import socket, struct, sys, time
for _ in range(200):
    try:
        peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)
        break
    except OSError:
        time.sleep(0.02)
peer.sendall(struct.pack("<IHHQQ", 0x4657524d, 9, 1, 8, 0) + bytes(8 + 32))  # a frame as of version 9
peer.settimeout(5)
text = b""
while True:
    more = peer.recv(4096)
    if not more:
        break
    text += more
sys.stdout.buffer.write(text)
"""


def test_peer_of_another_version(plugged, folder):
    """It is told; rank 0 says who it was and what it speaks; the others say who is missing, and nobody hangs."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    port = 4900 + os.getpid() % 90
    ranks = []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MARROW_RENDEZVOUS": f"tcp://{plugged.address(0)}:{port}", "MARROW_SECRET_FILE": str(secret),
                     "MARROW_BOOTSTRAP_TIMEOUT": "4s"}
        ranks.append(subprocess.Popen(plugged.command(rank, [BUILD / "bin" / "marrow", "demo", "--path", "proxy", "--tokens",
                                                             "32"]),
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env={**os.environ, **variables}))
    told = subprocess.run(plugged.command(2, [sys.executable, "-c", STRANGER, plugged.address(0), port]),
                          capture_output=True, check=False, timeout=30)
    said = [process.communicate(timeout=20)[0] for process in ranks]
    assert re.search(rb"speaks version \d+ of the bootstrap protocol and refused", told.stdout), told
    assert all(process.returncode != 0 for process in ranks)
    assert re.search(rf"from {plugged.address(2)}:\d+: it speaks version 9", said[0]), said[0]
    for text in said:
        assert re.search(r"timeout: .*\b2\b", text), text


def test_killed_rank(plugged, folder):
    """Survivors return from their waits, name the rank, agree, and work on."""
    with Ranks(plugged, folder, "survivor") as ranks:
        for rank in range(3):
            ranks.hear(rank, "ready")
        time.sleep(0.1)
        killed = time.monotonic_ns()
        ranks.processes[2].send_signal(signal.SIGKILL)
        for rank in (0, 1):
            assert int(ranks.hear(rank, "woken")) - killed < 2e9
            assert ranks.result(rank) == "ok", ranks.log(rank)


def test_stopped_rank_loses_nothing(plugged, folder):
    with Ranks(plugged, folder, "talker") as ranks:
        for rank in range(3):
            ranks.hear(rank, "ready")
        time.sleep(0.2)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(5)
        ranks.processes[1].send_signal(signal.SIGCONT)
        for rank in range(3):
            assert ranks.result(rank) == "ok", ranks.log(rank)


def test_link_down_3_seconds_loses_nothing(plugged, folder):
    with Ranks(plugged, folder, "talker") as ranks:
        for rank in range(3):
            ranks.hear(rank, "ready")
        time.sleep(0.2)
        plugged.link(1, "down")
        time.sleep(3)
        plugged.link(1, "up")
        for rank in range(3):
            assert ranks.result(rank) == "ok", ranks.log(rank)


def test_link_down_for_good(plugged, folder):
    """Each side gives the other up after MARROW_PEER_TIMEOUT, in a sentence; the two that still reach each other work on;
    nobody keeps a file or a thread."""
    with Ranks(plugged, folder, "parted", {"MARROW_PEER_TIMEOUT": "3s"}) as ranks:
        for rank in range(3):
            ranks.hear(rank, "ready")
        time.sleep(0.3)
        plugged.link(2, "down")
        for rank in (0, 1):
            lost = ranks.hear(rank, "lost", 15)
            assert re.search(r"ank 2\b", lost) and re.search(r"silent for \d+ ms|reached|broke", lost), lost
            assert ranks.hear(rank, "masked") == "2 "
            assert ranks.result(rank) == "ok", ranks.log(rank)
        assert re.search(r"ank [01]\b", ranks.hear(2, "lost", 15))
        assert ranks.result(2) == "ok", ranks.log(2)


def test_full_disk_fails_no_communicator(plugged, folder):
    if not os.access("/dev/full", os.W_OK):
        cannot("no /dev/full")
    with Ranks(plugged, folder, "talker", {"MARROW_DEBUG": "TRACE", "MARROW_DEBUG_FILE": "/dev/full"}) as ranks:
        for rank in range(3):
            assert ranks.result(rank) == "ok", ranks.log(rank)
            assert int(ranks.hear(rank, "dropped")) > 0, "lines that were lost are counted"
