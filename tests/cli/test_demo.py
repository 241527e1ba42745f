# SPDX-License-Identifier: Apache-2.0
"""The main job: real tokens over every path, and one wrong bit that must be found and named."""
import re

import pytest
from conftest import DATA, ROOT

ROUTER = DATA / "router.jsonl"
REAL = ROOT.parent / "shared" / "routing" / "olmoe-1b-7b-layer0.jsonl"
SMALL = ("--tokens", 200, "--hidden", 32)


def rows(text):
    """The table's lines by path."""
    return {line.split()[0]: line.split() for line in text.splitlines() if re.match(r"(lsa|gda|proxy) ", line)}


def test_every_path_is_verified_by_default(marrow):
    text = marrow.ok("demo")
    table = rows(text)
    assert set(table) == {"lsa", "gda", "proxy"}
    for cells in table.values():
        assert cells[2] == "yes"
        assert cells[-1] == "emulated"  # the CPU device did the work
    assert text.count("all equal") == 3


@pytest.mark.parametrize("path", ["lsa", "gda", "proxy"])
def test_one_flipped_bit_is_found_and_named(marrow, path):
    said = marrow.fails(1, "demo", "--path", path, "--corrupt", *SMALL)
    assert re.search(rf"{path}: \d+ of \d+ elements are wrong\. First: dispatch: rank \d from rank 3, token 150, "
                     r"expert \d+, element 16: got \S+ \(0x[0-9a-f]{8}\), expected \S+ \(0x[0-9a-f]{8}\)", said), said


def test_a_byte_that_softnic_corrupts_is_found(marrow):
    said = marrow.fails(1, "demo", "--path", "gda", *SMALL, env={"MARROW_SOFTNIC": "corrupt=40"})
    assert re.search(r"gda: \d+ of \d+ elements are wrong\. First: (dispatch|return|combine): rank", said), said


@pytest.mark.parametrize("path", ["lsa", "gda", "proxy"])
def test_ranks_as_processes(marrow, path):
    assert rows(marrow.ok("demo", "--path", path, "--processes", *SMALL))[path][2] == "yes"


def test_a_wrong_element_is_the_exit_code_of_processes_too(marrow):
    assert "elements are wrong" in marrow.fails(1, "demo", "--path", "lsa", "--processes", "--corrupt", *SMALL)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_number_of_ranks(marrow, ranks):
    assert rows(marrow.ok("demo", "--path", "lsa", "--ranks", ranks, *SMALL))["lsa"][2] == "yes"


def test_more_ranks_than_tokens(marrow):
    assert rows(marrow.ok("demo", "--path", "lsa", "--ranks", 4, "--tokens", 2, "--hidden", 4))["lsa"][2] == "yes"


def test_json(marrow):
    document = marrow.json("demo", *SMALL)
    exchange = [r for r in document["results"] if r["what"] == "exchange time"]
    assert [r["path"] for r in exchange] == ["lsa", "gda", "proxy"]
    assert all(r["verified"] and r["kind"] == "emulated" for r in exchange)
    assert all(r["parameters"]["elements_checked"] == 200 * 32 * (8 + 8 + 1) for r in exchange)
    assert {r["what"] for r in document["results"]} == {"put latency", "signal latency", "exchange time"}


def test_json_in_a_file_beside_the_table(marrow, tmp_path):
    file = tmp_path / "demo.json"
    assert "verified" in marrow.ok("demo", "--path", "lsa", *SMALL, "--json", file)
    assert '"marrow.bench.1"' in file.read_text()
    marrow.fails(2, "demo", "--path", "lsa", *SMALL, "--json", tmp_path / "none" / "demo.json")


def test_router_log(marrow):
    text = marrow.ok("demo", "--path", "lsa", "--routing", ROUTER, "--hidden", 16)
    # Two layers are in the log; the first one counts: 96 tokens, not 192.
    assert "96 tokens of 16 floats, top-4 of 16 experts" in text and "synthetic/moe" in text
    assert "lsa: 384 rows sent" in text
    assert "10 tokens" in marrow.ok("demo", "--path", "lsa", "--routing", ROUTER, "--hidden", 16, "--tokens", 10)


@pytest.mark.parametrize("change, sentence", [
    (lambda lines: lines[1:], r"line 1: a route line before the meta line"),
    (lambda lines: lines[:1], r"no route line"),
    (lambda lines: lines[:5] + [lines[5][:40]], r"line 6: not a JSON object; the file is cut off"),
    (lambda lines: lines[:3] + ["[1, 2]"] + lines[3:], r"line 4: not a JSON object"),
    (lambda lines: lines[:1] + [lines[1].replace("[3, 1,", "[99, 1,")], r"line 2: expert 99 is not one of 0 to 15"),
    (lambda lines: lines[:1] + [lines[1].replace("[3, 1,", "[-1, 1,")], r"line 2: expert -1 is not"),
    (lambda lines: lines[:1] + [lines[1].replace("[3, 1,", "[1, 1,")], r"line 2: expert 1 twice in one token"),
    (lambda lines: lines[:1] + [lines[1].replace("[3, 1,", "[3,")], r"line 2: 'topk_ids' has 3 entries, top_k is 4"),
    (lambda lines: lines[:1] + [lines[1].replace("topk_weights", "w")], r"line 2: no list 'topk_weights'"),
    (lambda lines: lines[:1] + [lines[1].replace("[0.", '["a", 0.', 1).replace(", 0.200785", "")], r"line 2: weight \"a\" is not a number"),
    (lambda lines: [lines[0].replace('"top_k": 4', '"top_k": 0')] + lines[1:], r"line 1: 'top_k' must be a number from 1 to 32"),
    (lambda lines: [lines[0].replace('"num_experts"', '"experts"')] + lines[1:], r"line 1: 'num_experts' must be"),
])
def test_bad_router_logs_name_the_line(marrow, tmp_path, change, sentence):
    file = tmp_path / "router.jsonl"
    file.write_text("\n".join(change(ROUTER.read_text().splitlines())))
    said = marrow.fails(2, "demo", "--path", "lsa", "--routing", file)
    assert re.search(sentence, said), said


def test_missing_router_log(marrow, tmp_path):
    assert "cannot read the router log" in marrow.fails(2, "demo", "--routing", tmp_path / "none.jsonl")
    assert "failed" in marrow.fails(2, "demo", "--routing", tmp_path)
    assert "line 1: longer than 1 MiB" in marrow.fails(2, "demo", "--routing", "/dev/zero")


@pytest.mark.skipif(not REAL.exists(), reason=f"SKIP: the real router log {REAL} is not here")
def test_a_real_router_log_over_every_path(marrow):
    text = marrow.ok("demo", "--routing", REAL, "--hidden", 64)
    assert "6519 tokens of 64 floats, top-8 of 64 experts" in text
    assert all(cells[2] == "yes" for cells in rows(text).values())
    assert text.count("52152 rows sent") == 3
