#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes what bench/gpu/ep.sh measured a document (bench/schema.json).

    ep.py FOLDER     reads rows.json; writes ep.json
"""
import datetime
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gda_engine import machine, output  # noqa: E402


def main():
    folder = sys.argv[1]
    with open(os.path.join(folder, "rows.json")) as file:
        rows = json.load(file)
    here = os.path.dirname(os.path.abspath(__file__))
    commit = os.environ.get("MARROW_COMMIT") or output("git", "-C", here, "rev-parse", "--short", "HEAD")
    with open(os.path.join(here, "..", "..", "CMakeLists.txt")) as file:
        version = re.search(r"VERSION ([0-9]+\.[0-9]+\.[0-9]+)", file.read().split("project(", 1)[-1])
    document = {"schema": "marrow.bench.1", "command": "bench/gpu/ep.sh", "version": version.group(1),
                "commit": commit or "unknown",
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "machine": machine(), "parameters": {}, "results": rows}
    with open(os.path.join(folder, "ep.json"), "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
