"""`threefold data prepare` by a real Slurm and a real Ray: the store of one process, and parts that failed named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

import store_stub
from launchers import slurm
from launchers.sagemaker import PYTHON, ROOT
from ranks.faults import wait_for
from ranks.runs import command, environment
from threefold.data.store.blocks import Blocks
from threefold.places.upload import MARK
from unit.test_prepare import contents

RAY = list((ROOT / ".venv-launchers" / "lib").glob("python*/site-packages/ray"))
pytestmark = [pytest.mark.launchers, pytest.mark.timing, pytest.mark.timeout(300)]
needs_slurm = pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not()))
needs_ray = pytest.mark.skipif(
    not RAY, reason="no ray in .venv-launchers (make test-launchers)"
)

KEYS = ("--data.source", "rows.jsonl", "--data.tokenizer", "bytes")
# A folder that Python looks into first: parts of some kilobytes, and a task that dies at its first part once.
CUSTOMIZE = """
import os, signal
from threefold.data.store import parts, shared_parts
from threefold.data.text import rows
parts.PART_BYTES, rows._PIECE_BYTES = 90_000, 30_000
make = shared_parts.SharedParts.make
def dying(self, part):
    marks = os.environ["MARKS"]
    for number in os.environ.get("DIE_AT", "").split():
        if part.number == int(number):
            try:
                os.mkdir(f"{marks}/{number}")
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
    return make(self, part)
shared_parts.SharedParts.make = dying
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows, how they are prepared by one process, and the module that makes parts small."""
    lines = (f'{{"text": "row {i} {"word " * (i % 90)}"}}\n' for i in range(2000))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "customize").mkdir()
    (tmp_path / "customize" / "sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / "marks").mkdir()
    done = run(tmp_path, "--to", "local")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "local" / "tokens.parts").read_bytes().splitlines()) == 7
    return tmp_path


def variables(folder: Path, **others: str) -> dict[str, str]:
    paths = os.pathsep.join([str(folder / "customize"), str(ROOT / "src")])
    return {
        **environment(folder),
        "PYTHONPATH": paths,
        "MARKS": str(folder / "marks"),
        **others,
    }


def run(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "threefold", "data", "prepare", *KEYS, *arguments]
    told = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(words, cwd=folder, env=env or variables(folder), **told)


def without_list(made: dict[str, bytes]) -> dict[str, bytes]:
    """The files of the store; beside them is the list of what was read."""
    return {name: data for name, data in made.items() if name != "data.files.jsonl"}


def submitted(
    cluster: slurm.Cluster, folder: Path, to: str, *, env: dict[str, str]
) -> tuple[str, str]:
    """What the command for Slurm and its last job have printed."""
    words = (
        sys.executable,
        "-m",
        "threefold",
        "data",
        "prepare",
        *KEYS,
        "--to",
        to,
        "--engine",
        "slurm",
    )
    done = cluster.run(
        *words, "--name", "prepare", "--partition", "main", "--time", "5", cwd=folder, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(
        lambda: not cluster.run("squeue", "--noheader", cwd=folder, env=env).stdout.strip(),
        "the end",
        within_s=200,
    )
    joined = re.findall(r"job (\d+) joins and proves them", done.stdout)[0]
    return done.stdout, (folder / f"prepare-{joined}.out").read_text()


@needs_slurm
def test_an_array_makes_the_store_of_one_process(cluster: slurm.Cluster, folder: Path) -> None:
    """Two of its tasks are killed at work. The last job names their parts; the same command makes these alone."""
    said, joined = submitted(cluster, folder, "store", env=variables(folder, DIE_AT="1 4"))
    assert re.match(r"job \d+ makes parts in 6 tasks; job \d+ joins", said)
    assert "part 1 is missing; part 4 is missing\n" in joined, joined
    assert not (folder / "store" / "tokens.json").exists()
    said, joined = submitted(cluster, folder, "store", env=variables(folder))
    assert re.match(r"job \d+ makes parts in 2 tasks; ", said)
    assert "proof: the " in joined and "every digest was equal" in joined, joined
    assert without_list(contents(folder / "store")) == without_list(contents(folder / "local"))
    audit = command(folder, "data", "audit", "store", "--contents")
    assert "read again, every digest is equal" in audit.stdout, audit.stderr


@needs_slurm
def test_an_array_makes_that_store_at_an_address(cluster: slurm.Cluster, folder: Path) -> None:
    """One of its tasks is killed at work, and the command is given again."""
    (there := folder / "there").mkdir()
    node = cluster.nodes[0]
    program = [sys.executable, store_stub.__file__, node.address, str(there)]
    server = node.start(program, cwd=folder, env=variables(folder), output=there / "printed")
    try:
        wait_for((there / "endpoint").exists, "the store")
        env = variables(
            folder, AWS_ENDPOINT_URL=(there / "endpoint").read_text(), AWS_REGION="us-east-1"
        )
        env |= {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S"}
        for dies_at, printed in (("3", "part 3 is missing\n"), ("", "every digest was equal")):
            _, joined = submitted(
                cluster, folder, "s3://runs/t", env={**env, "DIE_AT": dies_at}
            )
            assert printed in joined
        (there / "end").touch()
        wait_for((there / "ended").exists, "the end of the store")
    finally:
        server.kill()
        server.wait()
    made = {path.name: path.read_bytes() for path in (there / "objects" / "t").iterdir()}
    assert json.loads(made.pop(MARK))["files"].keys() == made.keys()
    local = {name: (folder / "local" / name).read_bytes() for name in made}
    local["tokens.blocks"] = (
        Blocks.parse(local["tokens.blocks"], folder / "local").timeless().to_bytes()
    )
    assert made == local


@needs_ray
def test_tasks_of_ray_make_the_store_of_one_process(folder: Path) -> None:
    """Three of their processes are killed at work, and begun again by Ray."""
    # Ray is in the launchers' venv; torch and threefold are here.
    here = os.pathsep.join(
        [str(folder / "customize"), str(ROOT / "src"), sysconfig.get_path("purelib")]
    )
    words = [
        PYTHON,
        "-m",
        "threefold",
        "data",
        "prepare",
        *KEYS,
        "--to",
        "store",
        "--engine",
        "ray",
    ]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": short,
            "RAY_ADDRESS": "",
            "DIE_AT": "0 3 5",
        }
        env = {**variables(folder), **quiet, "PYTHONPATH": here}
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (folder / "marks").iterdir()) == ["0", "3", "5"]
    assert "every digest was equal when they were joined" in done.stdout
    assert without_list(contents(folder / "store")) == without_list(contents(folder / "local"))


def test_without_ray_it_is_named(folder: Path) -> None:
    done = run(folder, "--to", "store", "--engine", "ray")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-3:] == [
        "--engine ray, but the package ray is not installed",
        "  expected: threefold with its extra ray",
        "  fix: pip install 'threefold[ray]'",
    ]
