# SPDX-License-Identifier: Apache-2.0
"""The driver of ./test counts honestly: failures, skips and runs without a test are seen."""
import pathlib
import sys
import time
import xml.etree.ElementTree as xml

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import run_tests  # noqa: E402
from marrow_tests import harness, suites  # noqa: E402


def drive(monkeypatch, capsys, *results):
    fakes = [suites.Suite(f"s{i}", "fake", lambda _, r=r: r) for i, r in enumerate(results)]
    monkeypatch.setattr(suites, "ALL", fakes)
    status = run_tests.main([])
    return status, capsys.readouterr().out.splitlines()[-1]


def test_sums_are_the_last_line(monkeypatch, capsys):
    status, last = drive(monkeypatch, capsys, harness.Result(3, 0, 1), harness.Result(4, 0, 0))
    assert (status, last) == (0, "7 passed, 0 failed, 1 skipped")


def test_one_failure_fails_the_run(monkeypatch, capsys):
    status, last = drive(monkeypatch, capsys, harness.Result(3, 1, 0))
    assert (status, last) == (1, "3 passed, 1 failed, 0 skipped")


def test_a_run_without_a_test_fails(monkeypatch, capsys):
    status, last = drive(monkeypatch, capsys, harness.skip("nothing yet"))
    assert (status, last) == (1, "0 passed, 0 failed, 1 skipped")


def test_a_step_past_the_limit_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "LOGS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    context = harness.Context(deadline=time.monotonic() + 1)
    with pytest.raises(harness.OutOfTime):
        context.run(["sleep", "30"], "sleeper", cwd=tmp_path)


@pytest.mark.parametrize("body, expected", [
    ('<testcase status="run" result="completed"/>', (1, 0, 0)),
    ('<testcase status="run"><failure/></testcase>', (0, 1, 0)),
    ('<testcase status="run" result="skipped"><skipped/></testcase>', (0, 0, 1)),
    ('<testcase status="notrun" result="suppressed"/>', (0, 0, 0)),
])
def test_gtest_reports_are_read(tmp_path, body, expected):
    report = tmp_path / "r.xml"
    report.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    result = harness.junit(report)
    assert (result.passed, result.failed, result.skipped) == expected


def test_a_crash_after_the_cases_is_a_failure(tmp_path):
    report = tmp_path / "r.xml"
    report.write_text('<testsuites><testsuite><testcase status="run" result="completed"/></testsuite></testsuites>')
    case = xml.fromstring('<testcase name="r" status="fail"><failure message=""/></testcase>')
    result = harness._one_ctest(case, report)
    assert (result.passed, result.failed) == (1, 1)


def test_a_program_may_count_for_itself(tmp_path):
    text = "5 passed, 0 failed in 0.1 s\n12 passed, 0 failed in 3.0 s\n"
    case = xml.fromstring(f'<testcase name="r" status="run"><system-out>{text}</system-out></testcase>')
    result = harness._one_ctest(case, tmp_path / "none.xml")
    assert (result.passed, result.failed) == (12, 0)


def test_a_planted_bug_that_is_caught_is_a_pass(tmp_path):
    report = tmp_path / "r.xml"
    report.write_text('<testsuites><testsuite><testcase status="run"><failure/></testcase></testsuite></testsuites>')
    result = harness._one_ctest(xml.fromstring('<testcase name="r" status="run"/>'), report)
    assert (result.passed, result.failed) == (1, 0)
