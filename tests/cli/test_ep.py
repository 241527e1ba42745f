# SPDX-License-Identifier: Apache-2.0
"""`marrow ep`: checked first, timed apart, printed per rank."""
import re

import pytest
from conftest import DATA

QUICK = ("--iterations", 5)


def rows(document, what):
    return [row for row in document["results"] if row["what"] == what]


@pytest.mark.parametrize("path", ["lsa", "gda", "proxy"])
@pytest.mark.parametrize("words", [("--mode", "fast"), ("--mode", "exact", "--payload", "bf16", "--ranks", 3)])
def test_every_path_is_verified_and_in_the_schema(marrow, path, words):
    document = marrow.json("ep", "--path", path, *QUICK, *words)
    ranks = 3 if "--ranks" in words else 2
    for what in ("ep dispatch time", "ep combine time", "ep pair time"):
        found = rows(document, what)
        assert [row["parameters"]["rank"] for row in found] == list(range(ranks))
        for row in found:
            assert row["verified"] is True and row["kind"] == "emulated" and row["path"] == path
            assert row["unit"] == "us" and row["statistics"]["count"] == 5 and row["statistics"]["min"] > 0


def test_bytes_are_those_of_the_routing(marrow):
    document = marrow.json("ep", *QUICK, "--tokens", 8, "--topk", 2, "--experts", 2, "--hidden", 256)
    # Both experts of every token: each token has a row here and one over there.
    for row in rows(document, "ep dispatch time"):
        row_bytes = 256 + 2 * 4
        assert row["parameters"]["logical_bytes"] == 16 * row_bytes and row["parameters"]["wire_bytes"] == 8 * row_bytes
    for row in rows(document, "ep combine time"):
        assert row["parameters"]["logical_bytes"] == 16 * 512 and row["parameters"]["wire_bytes"] == 8 * 512
    speed = rows(document, "ep dispatch logical")[0]
    assert speed["unit"] == "GB/s"


def test_the_table_says_what_it_shows(marrow):
    text = marrow.ok("ep", *QUICK)
    assert "# memory a rank: " in text and "kind: emulated" in text
    assert re.search(r"^#library +rank +dispatch avg\[us\]", text, re.M)
    assert len(re.findall(r"^marrow +[01] ", text, re.M)) == 2


def test_a_router_log_gives_experts_and_topk(marrow):
    log = DATA / "router.jsonl"
    document = marrow.json("ep", *QUICK, "--routing", log)
    assert rows(document, "ep pair time")[0]["parameters"]["experts"] == 16
    assert "Leave --experts" in marrow.fails(2, "ep", "--routing", log, "--experts", 5)


def test_a_flipped_bit_is_found_and_nobody_hangs(marrow):
    done = marrow.run("ep", *QUICK, "--corrupt")
    assert done.returncode == 1 and "rank 0: row" in done.stderr and "the data is wrong" in done.stderr
    assert "timeout" not in done.stderr and not re.search("^marrow +0", done.stdout, re.M)


def test_processes(marrow):
    assert len(re.findall("^marrow +[012] ", marrow.ok("ep", *QUICK, "--processes", "--ranks", 3), re.M)) == 3


def test_what_is_not_compared_is_said(marrow, tmp_path):
    text = marrow.ok("ep", *QUICK, "--compare", f"deepep={tmp_path}")
    assert "# skipped: DeepEP: it needs GPUs" in text
    assert "is not deepep=PATH" in marrow.fails(2, "ep", "--compare", "pplx=/opt")


@pytest.mark.parametrize("words, sentence", [
    (("--topk", 9, "--experts", 4), "--topk is larger than --experts"),
    (("--hidden", 20), "a multiple of 16 bytes"),
    (("--payload", "fp9"), "Did you mean 'fp8'"),
    (("--routing", "/no/such/file"), "/no/such/file"),
])
def test_bad_arguments_get_a_sentence(marrow, words, sentence):
    assert sentence in marrow.fails(2, "ep", *words)
