"""CONTRIBUTING's "How to add": one of each kind is added to a copy of the source, works, and touches few files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "threefold"
MOST_FILES = 2


class Addition(NamedTuple):
    """What one adds, and a program that uses it.

    Attributes:
        edits: of a file of the source, text and what is put in its place; a file that is new has the text "".
        program: exits with 0 if what was added works.
    """

    edits: Mapping[str, tuple[str, str]]
    program: str


OPTIMIZER = Addition(
    {
        "config/optimizer.py": (
            '    "muon": NamedOptimizer(',
            '    "dummy": NamedOptimizer("threefold.optim.dummy:Dummy"),\n    "muon": NamedOptimizer(',
        ),
        "optim/dummy.py": ("", "import torch\n\nclass Dummy(torch.optim.SGD):\n    pass\n"),
    },
    """
import torch
from threefold.config.loading import load
from threefold.mesh.topology import Topology
from threefold.optim.build import build_optimizer
from threefold.optim.classes import problems
asked = load(None, [("optimizer.name", "dummy")], environ={}).config.optimizer
assert problems(asked, Topology(dp_replicate=1, dp_shard=2, cp=1, tp=1)) == []
assert type(build_optimizer(torch.nn.Linear(2, 2), asked)).__name__ == "Dummy"
""",
)

PROBE = Addition(
    {
        "check/probes.py": (
            "        results += _compared(model, mesh, rows, expected)\n",
            "        results += _compared(model, mesh, rows, expected)\n"
            "        results.append(Difference('dummy', 2.0, 1.0))\n"
            "        PROMISES['dummy'] = ('it is a dummy, by {:.1e}', 'none')\n",
        )
    },
    """
from threefold.check.admit import RefusedError, admit
from threefold.config.loading import validate
from threefold.mesh.mesh import init_mesh
from threefold.model.load import read_config
sizes = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "vocab_size": 64}
config = validate({"model": {"config": sizes}})
try:
    admit(config, read_config(config.model, vocab_size=64), init_mesh(device="cpu"))
except RefusedError as error:
    assert "it is a dummy, by 2.0e+00" in str(error), error
else:
    raise AssertionError("the probe was not asked")
""",
)

LAUNCHER = Addition(
    {
        "mesh/launchers/readers.py": (
            "_READERS = (",
            "def _read_dummy(environ):\n"
            "    if 'DUMMY_RANK' not in environ:\n"
            "        return None\n"
            "    rank = int(environ['DUMMY_RANK'])\n"
            "    return LaunchInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launcher='dummy',\n"
            "                      master_addr='localhost', master_port=1234)\n\n\n"
            "_READERS = (_read_dummy, ",
        )
    },
    """
from threefold.mesh.launchers.readers import read
info = read({"DUMMY_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"})
assert (info.rank, info.world_size, info.launcher) == (1, 2, "dummy"), info
""",
)

CLUSTER = Addition(
    {
        "jobs/clusters.py": (
            '    "slurm": "threefold.jobs.slurm",\n',
            '    "slurm": "threefold.jobs.slurm",\n    "dummy": "threefold.jobs.dummy",\n',
        ),
        "jobs/dummy.py": (
            "",
            '"""A dummy of a cluster."""\n'
            "from dataclasses import dataclass\n"
            "from threefold.jobs.settings import setting\n"
            "EXAMPLE = '--color blue'\n\n"
            "@dataclass(frozen=True)\n"
            "class Settings:\n"
            "    color: str = setting('of the job', 'red')\n\n"
            "def problems(config, ranks, settings):\n"
            "    return []\n\n"
            "def text(job, settings):\n"
            "    return f'{settings.color} for {job.config.train.steps} steps'\n",
        ),
    },
    """
import sys
sys.argv = ["threefold", "submit", "dummy", "--mesh.dp", "2", "--train.steps", "7", "--color", "green", "--dry-run"]
from threefold.commands.main import run
run()
""",
)

SECTION = Addition(
    {
        "report/sections.py": (
            '        "next": _next(facts),\n',
            '        "next": _next(facts),\n        "dummy": section("dummy", "A dummy", tag("p", "it is here")),\n',
        )
    },
    """
import pathlib, sys, tempfile
from threefold.report.document import report
from threefold.report.facts import gather
run = pathlib.Path(tempfile.mkdtemp())
(run / "config.yaml").write_text("train: {steps: 1}\\n")
(run / "run.json").write_text("{}")
(run / "metrics.jsonl").write_text("")
assert b"it is here" in report([gather(run)])
""",
)

PACKING = Addition(
    {
        "config/schema.py": (
            'Literal["concat", "best_fit", "none"]',
            'Literal["concat", "best_fit", "none", "dummy"]',
        ),
        "data/rows/best_fit.py": (
            '    "none": Placement("none 1", one_per_row),\n',
            '    "none": Placement("none 1", one_per_row),\n    "dummy": Placement("dummy 1", one_per_row),\n',
        ),
    },
    """
from pathlib import Path
import numpy as np
from threefold.config.loading import load
from threefold.data.rows.packing import Packing
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.data.store.writer import StoreWriter
with StoreWriter(Path("store"), dtype=np.dtype("<u2")) as writer:
    writer.add_block(np.array([1, 2, 9, 3, 9], np.uint16), np.array([3, 2], np.int32))
    writer.finish(lambda w: StoreInfo(w.content_hash(), "", w.num_tokens, w.num_documents, 0, "", "", "", "", 10, 9))
asked = load(None, [("data.packing", "dummy"), ("data.seq_len", "4")], environ={}).config.data
rows = Packing.of(asked).pack(TokenStore(Path("store")))
assert rows.num_rows == 2 and rows.fingerprint != Packing(4, "none").pack(TokenStore(Path("store"))).fingerprint
""",
)

ADDITIONS = {
    "packing": PACKING,
    "optimizer": OPTIMIZER,
    "probe": PROBE,
    "launcher": LAUNCHER,
    "cluster": CLUSTER,
    "page section": SECTION,
}


@pytest.mark.examples
@pytest.mark.parametrize("kind", ADDITIONS)
def test_one_of_its_kind_is_added_in_two_files_at_most(tmp_path: Path, kind: str) -> None:
    addition = ADDITIONS[kind]
    assert len(addition.edits) <= MOST_FILES
    copy = tmp_path / "src" / "threefold"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "src"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, (before, after) in addition.edits.items():
        path = copy / name
        text = path.read_text() if before else ""
        assert text.count(before) == 1 if before else not path.exists(), name
        path.write_text(text.replace(before, after) if before else after)
    command = [sys.executable, "-B", "-c", addition.program]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
