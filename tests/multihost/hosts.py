# SPDX-License-Identifier: Apache-2.0
"""Three hosts as network namespaces: each has its own interfaces, host name and /tmp of sockets, and one cable (veth) to a
switch (bridge) in a namespace of its own. As root, or inside a user namespace; nothing is left when the holders end."""
import os
import shutil
import signal
import subprocess
import time

TOOLS = ("ip", "unshare", "nsenter")


class NoHosts(Exception):
    """Why this machine cannot make them."""


def _run(command, what):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        raise NoHosts(f"{what}: {' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Hosts:
    """hosts.command(i, [...]) is a command line that runs in host i (0, 1, 2)."""

    def __init__(self, count=3):
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if missing:
            raise NoHosts(f"{', '.join(missing)} not found (iproute2, util-linux)")
        self.count = count
        self._holders = []
        # Root's own namespaces first: a user namespace may be forbidden to root in a container, and the other way
        # round.
        attempts = [[], ["--user", "--map-root-user"]] if os.geteuid() == 0 else [["--user", "--map-root-user"]]
        reason = None
        for flags in attempts:
            try:
                self._make(flags)
                return
            except NoHosts as error:
                reason = error
                self.close()
        raise reason

    def _hold(self, prefix, flags):
        """A sleeping process with a new network and host name; its number names the namespaces. It ends with us."""
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        holder = subprocess.Popen([*prefix, "unshare", *flags, "--net", "--uts", *ends_with_us, "sleep", "3600"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._holders.append(holder)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if holder.poll() is not None:
                raise NoHosts(f"unshare: {holder.stderr.read().strip()}")
            try:
                with open(f"/proc/{holder.pid}/comm", encoding="ascii") as comm:
                    ready = comm.read().strip() == "sleep"
                if ready and os.readlink(f"/proc/{holder.pid}/ns/net") != own:
                    return holder.pid
            except OSError:
                pass
            time.sleep(0.01)
        raise NoHosts("unshare did not start within 10 s")

    def _enter(self, pid, from_outside=True):
        """From inside, the user namespace is the same already, and could not be entered again."""
        user = ["--user", "--preserve-credentials"] if self._flags and from_outside else []
        return ["nsenter", "--target", str(pid), *user, "--net", "--uts"]

    def _make(self, flags):
        self._flags = flags
        self._switch = self._hold([], flags)
        inside = self._enter(self._switch)
        self._pids = [self._hold(inside if flags else [], []) for _ in range(self.count)]
        _run([*inside, "ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0"], "making a switch")
        _run([*inside, "ip", "link", "set", "switch", "up"], "making a switch")
        for i, pid in enumerate(self._pids):
            _run([*inside, "ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", "wire0", "netns", str(pid)],
                 "making a cable")
            _run([*inside, "ip", "link", "set", f"port{i}", "master", "switch", "up"], "making a cable")
            for command in (["hostname", self.name(i)], ["ip", "link", "set", "lo", "up"],
                            ["ip", "addr", "add", f"{self.address(i)}/24", "dev", "wire0"],
                            ["ip", "-6", "addr", "add", f"{self.address6(i)}/64", "dev", "wire0", "nodad"],
                            ["ip", "link", "set", "wire0", "up"]):
                if command[0] == "hostname" and not shutil.which("hostname"):
                    continue
                done = subprocess.run([*self._enter(pid), *command], capture_output=True, text=True, check=False)
                if done.returncode and command[1] != "-6":
                    raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")
                if command[1] == "-6":
                    self.has_ipv6 = done.returncode == 0

    @staticmethod
    def name(i):
        return f"host{i}"

    @staticmethod
    def address(i):
        return f"10.99.0.{i + 1}"

    @staticmethod
    def address6(i):
        return f"fd99::{i + 1}"

    def command(self, i, words):
        return [*self._enter(self._pids[i]), *map(str, words)]

    def link(self, i, state):
        """Pulls host i's cable out of the switch ("down") or puts it back ("up"). The port itself stays up: after a port
        was down, the kernel may take seconds to notice that it is up again."""
        where = ["nomaster"] if state == "down" else ["master", "switch"]
        _run([*self._enter(self._switch), "ip", "link", "set", f"port{i}", *where], "moving a cable")

    def agent(self, path):
        """A remote shell for mpirun: first argument an address of ours, then words for sh -c."""
        lines = ["#!/bin/sh", 'host=$1; shift', 'case $host in']
        for i in range(self.count):
            enter = " ".join(self._enter(self._pids[i], from_outside=False))
            lines.append(f'  {self.address(i)}|{self.name(i)}) exec {enter} sh -c "$*" ;;')
        lines += ['esac', 'echo "no host $host" >&2', "exit 1", ""]
        path.write_text("\n".join(lines))
        path.chmod(0o755)
        return path

    def close(self):
        for holder in reversed(self._holders):
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stderr.close()
        self._holders.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
