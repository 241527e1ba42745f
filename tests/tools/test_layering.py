# SPDX-License-Identifier: Apache-2.0
"""The layering check, and that it finds what it is for."""
import pathlib

import layering
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_include_follows_the_arrows():
    assert layering.check(ROOT) == []


@pytest.mark.parametrize("path, line, wrong", [
    ("src/base/a.cpp", '#include "core/communicator.hpp"', "base may not include core"),
    ("src/memory/a.cpp", '#include "gda/queue.hpp"', "memory may not include gda"),
    ("src/gda/a.cpp", '#include "proxy/ring.hpp"', "gda may not include proxy"),
    ("src/core/a.cpp", '#include "networks/shm/shm.hpp"', "core may not include networks"),
    ("src/core/a.cpp", '#include "../softnic/engine.hpp"', "core may not include softnic"),
    ("src/networks/shm/a.cpp", '#include "bootstrap/frame.hpp"', "networks may not include bootstrap"),
    ("src/ep/a.cpp", '#include "base/text.hpp"', "ep may not include base"),
    ("include/marrow/a.hpp", '#include "base/text.hpp"', "a public header includes src/base"),
    ("src/mystery/a.cpp", "", "part 'mystery' is unknown"),
])
def test_a_planted_upward_include_is_found(tmp_path, path, line, wrong):
    for header in ("core/communicator.hpp", "gda/queue.hpp", "proxy/ring.hpp", "networks/shm/shm.hpp",
                   "softnic/engine.hpp", "bootstrap/frame.hpp", "base/text.hpp"):
        file = tmp_path / "src" / header
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{line}\n")
    problems = layering.check(tmp_path)
    assert len(problems) == 1 and wrong in problems[0]


@pytest.mark.parametrize("path, line", [
    ("src/core/a.cpp", '#include "base/text.hpp"'),
    ("src/core/a.cpp", "#include <marrow/error.hpp>"),
    ("src/softnic/a.cpp", '#include "verbs/table.hpp"'),
    ("src/nccl/a.cpp", '#include "networks/shm/shm.hpp"'),
    ("src/base/a.cpp", "#include <memory>"),
])
def test_downward_includes_pass(tmp_path, path, line):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{line}\n")
    assert layering.check(tmp_path) == []
