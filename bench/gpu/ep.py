#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes what bench/gpu/ep.sh measured a document (bench/schema.json).

    ep.py FOLDER     reads rows.json; writes ep.json
"""
import os
import sys

import document


def main():
    folder = sys.argv[1]
    rows = document.load(os.path.join(folder, "rows.json"))
    document.write(os.path.join(folder, "ep.json"), "bench/gpu/ep.sh", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
