# SPDX-License-Identifier: Apache-2.0
"""What the scripts here share: rows that programs measured become one document (bench/schema.json), and a table says
which figures keep their limit."""
import datetime
import glob
import json
import os
import platform
import re
import subprocess


def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine():
    with open("/proc/cpuinfo") as file:
        cpu = re.search(r"model name\s*: (.*)", file.read())
    version = re.search(r"CUDA Version: *([0-9.]+)", output("nvidia-smi"))
    return {"host": platform.node(), "os": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": cpu.group(1) if cpu else "", "cores": os.cpu_count(),
            "gpus": output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
            "driver": version.group(1) if version else ""}


def commit():
    """What the figures are of: COMMIT where the tree is no checkout, else git's."""
    here = os.path.dirname(os.path.abspath(__file__))
    given = os.environ.get("COMMIT") or os.environ.get("MARROW_COMMIT")
    return given or output("git", "-C", here, "describe", "--always", "--dirty", "--exclude", "*") or "unknown"


def version():
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "..", "..", "CMakeLists.txt")) as file:
        found = re.search(r"VERSION ([0-9]+\.[0-9]+\.[0-9]+)", file.read().split("project(", 1)[-1])
    return found.group(1) if found else "0.0.0"


def write(path, command, rows, parameters=None):
    """Writes the rows as that command's document."""
    now = datetime.datetime.now(datetime.timezone.utc)
    document = {"schema": "marrow.bench.1", "command": command, "version": version(), "commit": commit(),
                "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "machine": machine(), "parameters": parameters or {},
                "results": rows}
    with open(path, "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def load(path):
    with open(path) as file:
        return json.load(file)


def repeats(folder, pattern):
    """The rows of each repeat, in order: a list of lists."""
    return [load(path) for path in sorted(glob.glob(os.path.join(folder, pattern)))]
