# SPDX-License-Identifier: Apache-2.0
"""Every other command, bad arguments, and the reduced command line."""
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import jsonschema
import pytest
from conftest import ROOT, SCHEMA

QUICK = ("--iterations", 20)
OPERATIONS = {"put": "8,1K", "put_value": "8,24", "get": "8,4K", "signal": None, "packet": "8,64",
              "barrier": None, "alltoall": "1K,1M"}


def test_help_has_examples_and_every_command(marrow):
    text = marrow.ok("--help")
    for command in ("demo", "perf", "ep", "info", "doctor", "env", "errors"):
        assert re.search(rf"^  {command} ", text, re.M)
        assert "Examples:\n  marrow " + command in marrow.ok(command, "--help")
    assert marrow.ok("--version").startswith("marrow 0.")


@pytest.mark.parametrize("words, sentence", [
    (("dem",), "Did you mean 'demo'"),
    (("demo", "--rank", "3"), "Did you mean '--ranks'"),
    (("demo", "--ranks", "x"), "--ranks is 'x': it must be a whole number from 1 to 64"),
    (("demo", "--ranks", "0"), "--ranks is '0'"),
    (("demo", "--ranks", "65"), "from 1 to 64"),
    (("demo", "--path", "lsaa"), "Did you mean 'lsa'"),
    (("demo", "--hidden", "6"), "must be a multiple of 4"),
    (("demo", "--json"), "--json"),
    (("demo", "--ranks", "33", "--path", "lsa", "--routing", str(ROOT / "tests/cli/data/router.jsonl")), "16 experts cannot be spread over 33 ranks"),
    (("perf",), "operation is required"),
    (("perf", "putt"), "Did you mean 'put'"),
    (("perf", "put", "extra"), "extra"),
    (("perf", "put", "--sizes", "8,,"), "--sizes has ''"),
    (("perf", "put", "--sizes", "1M..8"), "the first size is larger"),
    (("perf", "put", "--ranks", "1"), "perf put needs 2 ranks"),
    (("perf", "put_value", "--sizes", "12"), "put_value is timed with 8 and 24 bytes"),
    (("perf", "put", "--memory", "device"), "the CPU device has host memory only"),
    (("perf", "put", "--blocks", "1024", "--threads", "1024"), "at most 4096 OS threads"),
    (("info", "--network", "nothing", "--path", "proxy"), "nothing"),
    (("env", "--json", "/no/such/folder/env.json"), "cannot write"),
])
def test_bad_arguments_get_a_sentence(marrow, words, sentence):
    assert sentence in marrow.fails(2, *words)


@pytest.mark.parametrize("words", [("demo",), ("demo", "--processes"), ("perf", "put"), ("perf", "put", "--processes"),
                                   ("info",)])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(marrow, words):
    start = time.monotonic()
    done = marrow.run(*words, "--json", "/no/such/folder/result.json")
    assert done.returncode == 2 and "cannot write /no/such/folder/result.json" in done.stderr
    assert done.stderr.count("cannot write") == 1 and "median" not in done.stdout and "verified" not in done.stdout
    assert time.monotonic() - start < 5


def test_a_refused_run_leaves_the_file_alone(marrow, tmp_path):
    file, none = tmp_path / "old.json", tmp_path / "new.json"
    file.write_text("old")
    marrow.fails(2, "perf", "put_value", "--sizes", "12", "--json", file)
    marrow.fails(2, "perf", "put_value", "--sizes", "12", "--json", none)
    assert file.read_text() == "old" and not none.exists()


@pytest.mark.parametrize("mebibytes", [24, 40, 64, 100, 160, 300])
def test_too_little_memory_is_a_sentence(marrow, mebibytes):
    """ulimit -v at many sizes: whatever fails first, it says so and how to go on."""
    words = ("perf", "put", "--path", "proxy", "--sizes", "256M", "--iterations", "1", "--warmup", "1", "--ranks", "2")
    done = subprocess.run(["bash", "-c", f"ulimit -v {mebibytes * 1024} && exec \"$0\" \"$@\"", str(marrow.path), *words],
                          capture_output=True, text=True, timeout=50, check=False)
    if "error while loading shared libraries" in done.stderr:
        return
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    assert "bad_alloc" not in done.stderr and "terminate" not in done.stderr, done.stderr
    assert "marrow: " in done.stderr and ("Next: " in done.stderr or "raise the limit" in done.stderr), done.stderr
    assert re.search(r"ulimit -[uv]", done.stderr), done.stderr


@pytest.mark.parametrize("variable, sentence", [
    ("MARROW_PATH=lsaa", "'lsaa' is not a path"),
    ("MARROW_NETWORK=smh", "there is no network 'smh'"),  # also where every pair is load/store
])
def test_the_environment_counts_without_an_option(marrow, variable, sentence):
    name, value = variable.split("=")
    assert sentence in marrow.fails(2, "perf", "signal", *QUICK, env={name: value})


def test_path_of_the_environment_is_taken(marrow):
    assert "path proxy on shm" in marrow.ok("perf", "signal", *QUICK, env={"MARROW_PATH": "proxy"})


@pytest.mark.parametrize("words", [("put", "--path", "proxy"), ("barrier", "--path", "lsa"),
                                   ("alltoall", "--path", "gda", "--sizes", "64K")])
def test_a_timeout_names_both_ranks(marrow, words):
    """Rank 1 is stopped: rank 0 says whom it waited for, and neither text leaves the other out."""
    team = subprocess.Popen([str(marrow.path), "perf", *words, "--iterations", "10000000", "--ranks", "2", "--processes"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "MARROW_WAIT_TIMEOUT": "1s", "MARROW_BOOTSTRAP_TIMEOUT": "20s"})
    deadline = time.monotonic() + 20
    while len(children_of(team.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = sorted(children_of(team.pid))
    time.sleep(1)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(3)
    os.kill(ranks[1], signal.SIGCONT)
    _, told = team.communicate(timeout=40)
    assert team.returncode == 1, told
    assert re.search(r"ended with timeout on rank 0, block 0, waiting for rank 1\. Next: see what rank 1 does", told), told


def test_why_there_is_no_nic_is_told(marrow):
    told = marrow.fails(2, "perf", "signal", "--path", "gda", *QUICK, env={"MARROW_SOFTNIC": "colour=red"})
    assert "invalid_argument: MARROW_SOFTNIC: softnic has no option 'colour=red'" in told
    # Nor does a demo of all paths take it for a machine without the gda path.
    marrow.fails(2, "demo", "--tokens", 64, "--hidden", 8, env={"MARROW_SOFTNIC": "drop=many"})
    assert "no RDMA device named nope" in marrow.fails(2, "perf", "signal", "--path", "gda", *QUICK, env={"MARROW_NIC": "nope"})


def test_output_that_cannot_be_written_is_no_success(marrow):
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(marrow.path), "env"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    assert done.returncode == 2 and "standard output could not be written" in done.stderr


def test_log_lines_that_were_lost_are_counted(marrow):
    logged = {"MARROW_DEBUG": "TRACE", "MARROW_DEBUG_FILE": "/dev/full"}
    done = marrow.run("perf", "signal", "--path", "lsa", *QUICK, env=logged)
    assert done.returncode == 0, done.stderr
    lost = re.search(r"marrow: (\d+) log lines could not be written", done.stderr)
    assert lost and int(lost.group(1)) > 0, done.stderr
    assert "log lines" not in marrow.run("perf", "signal", "--path", "lsa", *QUICK).stderr
    # A command that fails is the one whose log somebody looks for.
    done = marrow.run("perf", "signal", "--path", "gda", "--network", "nothere", *QUICK, env=logged)
    assert done.returncode != 0 and "log lines could not be written" in done.stderr, done.stderr


def children_of(pid):
    return [int(p) for p in (pathlib.Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()]


def started_processes(marrow, *words):
    """Four ranks as processes that would run for minutes, once they exist."""
    team = subprocess.Popen([str(marrow.path), "perf", *map(str, words), "--ranks", "4", "--processes"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(children_of(team.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(2)
    return team, children_of(team.pid)


def test_a_stopped_team_leaves_nothing(marrow):
    before = set(pathlib.Path("/tmp").glob("marrow-ranks-*"))
    team, ranks = started_processes(marrow, "barrier", "--path", "lsa", "--iterations", 10000000)
    mine = set(pathlib.Path("/tmp").glob("marrow-ranks-*")) - before
    team.terminate()
    team.communicate(timeout=20)
    assert team.returncode == -signal.SIGTERM
    assert len(ranks) == 4 and mine
    assert not any(pathlib.Path(f"/proc/{rank}").exists() for rank in ranks)
    deadline = time.monotonic() + 5
    while any(folder.exists() for folder in mine) and time.monotonic() < deadline:
        time.sleep(0.1)  # another test's team may have been starting
    assert not any(folder.exists() for folder in mine)


def test_a_killed_rank_ends_a_batch_of_launches(marrow):
    team, ranks = started_processes(marrow, "alltoall", "--path", "lsa", "--sizes", "64K", "--iterations", 10000000)
    os.kill(ranks[1], signal.SIGKILL)
    start = time.monotonic()
    _, told = team.communicate(timeout=30)
    assert time.monotonic() - start < 5 and team.returncode == 1
    assert "peer_failed: rank 1 failed" in told


def test_gpus_that_are_not_there(marrow):
    done = marrow.run("demo", "--place", "gpu", "--path", "lsa", "--tokens", 64, "--hidden", 16)
    if done.returncode == 0:
        pytest.skip("SKIP: this machine and build have a GPU")
    assert done.returncode == 2 and "use --place cpu" in done.stderr


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("path", ["lsa", "gda", "proxy"])
def test_perf(marrow, operation, path):
    sizes = OPERATIONS[operation]
    words = ("perf", operation, "--path", path, *QUICK, *(("--sizes", sizes) if sizes else ()))
    document = marrow.json(*words)
    times = [r for r in document["results"] if r["unit"] == "us"]
    assert len(times) == (len(sizes.split(",")) if sizes else 1)
    for row in document["results"]:
        assert row["kind"] == "emulated" and row["path"] == path
        assert row.get("verified", True)
        assert 0 < row["statistics"]["min"] <= row["statistics"]["median"] <= row["statistics"]["max"]
    if operation in ("put", "get", "alltoall"):
        assert all(r["verified"] for r in times)
        assert any(r["unit"] == "GB/s" for r in document["results"])
    if path == "gda":
        assert all(any(d["device"] == "softnic" for d in r["devices"]) for r in document["results"])


def test_perf_floor_is_taken_in_turns_with_put(marrow):
    rows = marrow.json("perf", "floor", "--path", "lsa", *QUICK)["results"]
    times = {what: [r for r in rows if r["what"] == what] for what in {r["what"] for r in rows}}
    assert set(times) == {"put latency", "floor: put + signal"}
    assert len(times["put latency"]) == len(times["floor: put + signal"])
    assert all(r["unit"] == "us" and r["statistics"]["min"] > 0 and r["verified"] for r in rows)
    done = marrow.run("perf", "floor", "--path", "gda", *QUICK)
    assert done.returncode == 2 and "give --path lsa" in done.stderr


def test_perf_table_says_what_it_shows(marrow):
    text = marrow.ok("perf", "put", "--path", "lsa", "--sizes", "8,64", *QUICK)
    assert "half of a round trip" in text and "kind: emulated" in text
    heading = next(line for line in text.splitlines() if "#bytes" in line)
    assert heading.split() == ["#bytes", "iterations", "t_min[us]", "t_median[us]", "t_avg[us]", "t_p99[us]", "t_max[us]",
                               "BW[GB/s]", "rate[Mops/s]"]
    assert len([line for line in text.splitlines() if re.match(r" *(8|64) ", line)]) == 2


def test_perf_with_processes_blocks_and_threads(marrow):
    marrow.ok("perf", "signal", "--processes", *QUICK)
    marrow.ok("perf", "put", "--path", "lsa", "--blocks", 2, "--threads", 2, "--sizes", "4K", *QUICK)
    marrow.ok("perf", "alltoall", "--path", "lsa", "--ranks", 3, "--blocks", 2, "--threads", 2, "--sizes", "3K,1M", *QUICK)


def test_perf_joins_a_launcher(marrow, tmp_path):
    """torchrun's variables: two processes find each other, the first one prints."""
    import concurrent.futures
    env = {"MARROW_RENDEZVOUS": f"file://{tmp_path}/meet", "WORLD_SIZE": "2"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda r: marrow.run("perf", "signal", *QUICK, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}),
                             range(2)))
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert "signal" in done[0].stdout and done[1].stdout == ""
    said = marrow.fails(2, "perf", "signal", "--ranks", "3", env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                                                                    "MARROW_RENDEZVOUS": f"file://{tmp_path}/alone"})
    assert "the launcher started 1 ranks" in said


@pytest.mark.parametrize("write", [3, 4])
def test_perf_finds_a_corrupted_byte(marrow, write):
    """Of two puts each way, the last one of either rank: its bytes stay."""
    said = marrow.fails(1, "perf", "put", "--path", "gda", "--sizes", "1K", "--iterations", 1, "--warmup", 1,
                        env={"MARROW_SOFTNIC": f"corrupt={write}"})
    assert "1024 bytes" in said and "the data is wrong" in said


def test_committed_results_obey_the_schema():
    for file in sorted((ROOT / "results").rglob("*.json")):
        jsonschema.validate(json.loads(file.read_text()), SCHEMA, cls=jsonschema.Draft7Validator)


@pytest.mark.parametrize("change", [
    {"kind": "measured"}, {"kind": "modelled"}, {"kind": "measured (host)"}, {"devices": []}, {"unit": "parsecs"}, {"statistics": {}},
])
def test_the_schema_itself_refuses_a_kind_that_lies(marrow, change):
    document = marrow.json("perf", "signal", *QUICK)
    document["results"][0].update(change)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft7Validator)


def test_info(marrow):
    text = marrow.ok("info", "--ranks", 3)
    assert "softnic" in text and "shm" in text
    assert len(re.findall(r"^ +[0-2] +[0-2]  lsa ", text, re.M)) == 9
    document = marrow.json("info", "--path", "proxy")
    assert {p["path"] for p in document["pairs"]} == {"proxy"}
    assert all(any(r.startswith("lsa: ") for r in p["rejected"]) for p in document["pairs"])
    assert {w["memory"] for w in document["windows"]} == {"device", "host"}
    assert any(n["name"] == "shm" and n["usable"] for n in document["inventory"]["networks"])


def test_doctor_on_a_machine_without_a_nic(marrow):
    done = marrow.run("doctor", "--json", "-")
    document = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft7Validator)
    found = document["diagnosis"]
    assert done.returncode == (0 if found["usable"] else 1)
    if found["usable"]:
        pytest.skip("SKIP: this machine has a ConnectX and a GPU that can use it")
    assert found["nic"] == "" and any(n["state"] == "missing" for n in found["needs"])
    text = marrow.run("doctor").stdout
    for need in found["needs"]:  # all at once, each with its fix
        assert need["name"] in text and need["fix"] in text
    assert "not usable on a real NIC here" in text


def test_doctor_on_softnic(marrow):
    text = marrow.ok("doctor", "--nic", "softnic")
    assert "usable on softnic" in text and "DevX" in text and "missing" not in text
    assert marrow.json("doctor", env={"MARROW_NIC": "softnic"})["diagnosis"]["emulated"]
    missing = marrow.run("doctor", "--nic", "mlx5_77")
    assert missing.returncode == 1


def test_env(marrow):
    text = marrow.ok("env", env={"MARROW_PATH": "gda"})
    assert re.search(r"^MARROW_PATH +gda +environment", text, re.M)
    document = marrow.json("env")
    names = [p["name"] for p in document["environment"]]
    assert names == sorted(names) and "MARROW_NETWORK" in names


def test_errors(marrow):
    text = marrow.ok("errors")
    assert re.search(r"^peer_failed +4 ", text, re.M)
    for line in marrow.ok("errors", "--markdown").splitlines():
        if line.startswith("| `"):
            assert all(cell.strip() for cell in line.strip("|").split(" | ")), line


@pytest.mark.parametrize("page, command", [("env.md", "env"), ("errors.md", "errors")])
def test_generated_pages_are_up_to_date(marrow, page, command):
    assert (ROOT / "docs" / page).read_text() == marrow.ok(command, "--markdown"), f"Next: marrow {command} --markdown > docs/{page}"


class TestReduced:
    def test_says_that_it_is_reduced(self, reduced):
        for words in ((), ("--help",), ("perf", "--help"), ("demo", "--path", "lsa", "--tokens", 64, "--hidden", 16), ("env",)):
            assert "reduced command line, built without CLI11 and nlohmann-json" in reduced.ok(*words)

    def test_does_the_work(self, reduced):
        assert "all equal" in reduced.ok("demo", "--path", "lsa", "--tokens", 64, "--hidden=16")
        assert "t_median" in reduced.ok("perf", "put", "--path=lsa", "--sizes", "8", *QUICK)
        assert "softnic" in reduced.ok("info")
        assert "usable on softnic" in reduced.ok("doctor", "--nic", "softnic")
        assert "MARROW_PATH" in reduced.ok("env")

    def test_env_pages_are_those_of_the_full_one(self, reduced, marrow):
        assert reduced.ok("env", "--markdown") == marrow.ok("env", "--markdown")

    @pytest.mark.parametrize("words, sentence", [
        (("dem",), "Did you mean 'demo'"),
        (("demo", "--rank", "3"), "Did you mean --ranks"),
        (("demo", "--ranks"), "--ranks needs a value"),
        (("demo", "--corrupt=1"), "--corrupt takes no value"),
        (("demo", "more"), "'more' is one word too many"),
        (("perf",), "operation is required"),
        (("demo", "--json", "-"), "without nlohmann-json"),
        (("demo", "--routing", "x"), "without nlohmann-json"),
    ])
    def test_bad_arguments_get_a_sentence(self, reduced, words, sentence):
        assert sentence in reduced.fails(2, *words)
