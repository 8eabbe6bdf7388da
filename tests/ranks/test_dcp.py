"""Checkpoints and torch.distributed.checkpoint: it reads ours in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.spawn import run_ranks
from ranks.test_resume_meshes import MOE
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.manifest import read_manifest
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).with_name("dcp_program.py")


def _trained(sizes: Sizes, folder: str, model: dict[str, Any]) -> None:
    run = Miniature(sizes, folder, model={"config": model})
    run.advance(2)
    run.checkpointer.save(2, None, True)
    run.checkpointer.saver.wait()


@pytest.mark.parametrize(
    ("model", "sizes"), [(LLAMA, (1, 2, 1, 2)), (MOE, (2, 1, 1, 2))], ids=["llama", "experts"]
)
def test_a_program_of_torch_alone_reads_a_checkpoint(
    model: dict[str, Any], sizes: Sizes, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    run_ranks(_trained, 4, sizes, str(tmp_path / "run"), model)
    checkpoint = find(tmp_path / "run")
    config, out = tmp_path / "config.json", tmp_path / "read.safetensors"
    config.write_text(json.dumps(read_manifest(checkpoint)["architecture"]))
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(checkpoint.state), str(config), str(out)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [each.communicate(timeout=120)[1][-2000:] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], errors
    index, read = Index.read(checkpoint.state), load_file(out)
    assert read.keys() == {name for name in index.entries if not name.startswith("random.")}
    for name, values in read.items():
        assert torch.equal(values, read_whole(checkpoint.state, index.entries[name])), name
