"""Runs of one process in bfloat16: stopped and resumed, evaluated, averaged, exported, and moved to other meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks.runs import command, prepare
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole

pytestmark = pytest.mark.ranks

ONE = (
    "--mesh.dp",
    "1",
    "--model.dtype",
    "bfloat16",
    "--train.micro_batch",
    "4",
    "--checkpoint.every",
    "3",
)
ONE += (
    "--data.eval_share",
    "0.05",
    "--eval.every",
    "3",
    "--optimizer.ema",
    "0.9",
    "--train.grad_clip",
    "0.5",
    "--optimizer.lr",
    "1e-3",
)
KINDS = {
    "whole": (),
    "narrow": ("--optimizer.moments", "bfloat16", "--optimizer.betas", "[0.9, 0.95]"),
    "tied": (),
    "adapters": ("--model.lora.r", "4"),
}


def trained(folder: Path, run: str, steps: int, *arguments: str) -> str:
    done = command(
        folder,
        "train",
        "config.yaml",
        "--log.dir",
        run,
        "--train.steps",
        str(steps),
        *arguments,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(run: Path) -> dict[tuple[int, str], Any]:
    """What the run measured: losses, norms, and its evaluation's, by step."""
    found: dict[tuple[int, str], Any] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found |= {
            (values["step"], name): values[name]
            for name in ("loss", "grad_norm", "eval_loss")
            if name in values
        }
    return found


def state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointFolder(run).newest()
    assert checkpoint is not None
    index = Index.read(checkpoint.state)
    return {name: read_whole(checkpoint.state, entry) for name, entry in index.entries.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_to_the_bit_and_moves_to_other_meshes(tmp_path: Path, kind: str) -> None:
    prepare(tmp_path)
    if kind == "tied":
        config = tmp_path / "config.yaml"
        config.write_text(
            config.read_text().replace("{model_type", "{tie_word_embeddings: true, model_type")
        )
    own = (*ONE, *KINDS[kind])
    said = trained(tmp_path, "unbroken", 6, *own)
    assert "data parallelism: none" in said and "weights: a copy in bfloat16" in said
    trained(tmp_path, "broken", 3, *own)
    trained(tmp_path, "broken", 6, *own)
    unbroken, broken = lines(tmp_path / "unbroken"), lines(tmp_path / "broken")
    assert (
        broken == unbroken
        and (6, "eval_loss") in broken
        and min(v for (_, n), v in broken.items() if n == "loss")
    )
    expected, found = state(tmp_path / "unbroken"), state(tmp_path / "broken")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    weights = [name for name in found if name.startswith(("model.", "ema."))]
    assert weights and {found[name].dtype for name in weights} == {torch.float32}
    narrow = {found[name].dtype for name in found if name.startswith("optimizer.exp_avg")}
    assert narrow == {torch.bfloat16 if kind == "narrow" else torch.float32}

    exported = command(tmp_path, "export", "broken", "--to", "exported")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    if kind in ("whole", "narrow"):
        written = load_file(tmp_path / "exported" / "model.safetensors")
        assert all(
            torch.equal(written[name.removeprefix("model.")], found[name])
            for name in found
            if name[:6] == "model."
        )

    # FSDP2 reads what the one process wrote, and writes what that reads.
    moved = trained(tmp_path, "broken", 9, *own, "--mesh.dp", "2", "--mesh.dp_shard", "2")
    assert "data parallelism: fsdp" in moved
    trained(tmp_path, "broken", 12, *own)
    trained(tmp_path, "unbroken", 12, *own)
    bound = 2e-2  # other roundings to bfloat16, carried on by updates
    unbroken, broken = lines(tmp_path / "unbroken"), lines(tmp_path / "broken")
    for step in range(1, 13):
        assert broken[step, "loss"] == pytest.approx(unbroken[step, "loss"], abs=bound), step
