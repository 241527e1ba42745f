# SPDX-License-Identifier: Apache-2.0
"""./demo and ./test as a stranger meets them: a clean clone, no root, no network (loopback only)."""
import os
import shutil
import subprocess
import tempfile

from .harness import ROOT, Result, skip

NOBODY = 65534
# Brings loopback up in a new network namespace without needing iproute2: SIOCSIFFLAGS on "lo".
LOOPBACK_UP = ("import fcntl,socket,struct,sys,os;"
               "s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);"
               "fcntl.ioctl(s,0x8914,struct.pack('16sh14s',b'lo',1,b''));"
               "os.execvp(sys.argv[1],sys.argv[1:])")


def offline(command):
    """The command in a network namespace of its own, as a user who is not root."""
    loopback = ["/usr/bin/env", "python3", "-c", LOOPBACK_UP]
    if os.geteuid() == 0:
        return ["unshare", "-n", *loopback, "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
                *command]
    return ["unshare", "-Urn", *loopback, *command]


def run(context):
    if not shutil.which("unshare") or subprocess.run(offline(["true"]), capture_output=True, check=False).returncode:
        return skip("this machine allows no network namespace")
    with tempfile.TemporaryDirectory(prefix="marrow-clone-") as folder:
        clone = os.path.join(folder, "marrow")
        if context.run(["git", "-c", f"safe.directory={ROOT}", "-c", f"safe.directory={ROOT}/.git", "clone", "--quiet", "--no-hardlinks", ROOT, clone],
                       "clone"):
            return Result(failed=1, note="git clone failed")
        home = os.path.join(folder, "home")
        os.mkdir(home)
        if os.geteuid() == 0:
            os.chmod(folder, 0o755)
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", clone, home], check=True)
        # Without a network and root much is skipped there, whatever the machine has promised.
        env = {"HOME": home, "CCACHE_DIR": os.path.join(home, "ccache"), "CI": "", "MARROW_TEST_REQUIRE": ""}
        result = Result()
        for name, command, limit in (("clone-demo", ["./demo"], 360), ("clone-demo-again", ["./demo"], 20),
                                     ("clone-demo-install", ["cmake", "--install", "build/demo", "--prefix", "build/there"], 30),
                                     ("clone-demo-lo-down", ["unshare", "-Un", "./demo"], 30),
                                     ("clone-test", ["./test"], 1500), ("clone-clean", ["./demo", "--clean"], 10)):
            status = context.run(offline(command), name, env=env, cwd=clone, limit=limit)
            result += Result(passed=int(status == 0), failed=int(status != 0), note=f"{name} failed" if status else "")
        left = subprocess.run(["git", "-c", f"safe.directory={clone}", "status", "--porcelain", "--ignored"], cwd=clone,
                              capture_output=True, text=True, check=False).stdout
        if left.strip():
            result += Result(failed=1, note=f"left in the tree: {left.split()[1]}")
        else:
            result += Result(passed=1)
        return result
