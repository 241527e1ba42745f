# SPDX-License-Identifier: Apache-2.0
"""Running the command `marrow` of the release build, with short deadlines."""
import json
import os
import pathlib
import subprocess

import jsonschema
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(__file__).resolve().parent / "data"
SCHEMA = json.loads((ROOT / "bench" / "schema.json").read_text())


def binary(name):
    folder = pathlib.Path(os.environ.get("MARROW_TEST_CLI", ROOT / "build" / "release" / "bin" / "marrow")).parent
    path = folder / name
    if not path.exists():
        pytest.fail(f"{path} is missing. Next: build the release preset, or set MARROW_TEST_CLI.")
    return path


class Command:
    """Calls one of the two command lines. `ok`, `fails` and `json` say what must come back."""

    def __init__(self, name):
        self.path = binary(name)

    def run(self, *words, env=None, timeout=50):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MARROW_", "OMPI_", "PMI", "SLURM_"))
                 and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        clean.update({"MARROW_WAIT_TIMEOUT": "20s", "MARROW_BOOTSTRAP_TIMEOUT": "20s", **(env or {})})
        return subprocess.run([str(self.path), *map(str, words)], env=clean, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=timeout, check=False)

    def ok(self, *words, **kwargs):
        done = self.run(*words, **kwargs)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, code, *words, **kwargs):
        """The text on stderr: one sentence that starts with the program's name."""
        done = self.run(*words, **kwargs)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "marrow: " in done.stderr
        return done.stderr

    def json(self, *words, **kwargs):
        """--json - of a command, checked against the schema."""
        document = json.loads(self.ok(*words, "--json", "-", **kwargs))
        jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft7Validator)
        return document


@pytest.fixture(scope="session")
def marrow():
    return Command("marrow")


@pytest.fixture(scope="session")
def reduced():
    return Command("marrow-reduced")
