"""Folders of transformers that a run writes on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.runs import command, prepare

pytestmark = pytest.mark.ranks


def test_exports_are_those_of_the_command(tmp_path: Path) -> None:
    """On four ranks, of the steps that are asked for, and again of a step that is made once more."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    prepare(tmp_path)
    asked = (
        "--checkpoint.every",
        "2",
        "--checkpoint.export_every",
        "4",
        "--checkpoint.keep",
        "3",
        "--mesh.dp",
        "2",
        "--mesh.tp",
        "2",
    )
    done = command(
        tmp_path, "train", "config.yaml", "--log.dir", "run", "--train.steps", "6", *asked
    )
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "run/exports").iterdir())
    assert [each.name for each in folders] == ["step-00000004"]
    assert "exported after step 4: run/exports/step-00000004; " in done.stdout
    assert (
        command(tmp_path, "export", "run/checkpoints/step-00000004", "--to", "own").returncode
        == 0
    )
    theirs, ours = (
        load_file(each / "model.safetensors") for each in (tmp_path / "own", folders[0])
    )
    assert theirs.keys() == ours.keys() and all(
        bool((theirs[name] == ours[name]).all()) for name in theirs
    )
    AutoModelForCausalLM.from_pretrained(folders[0])
    (folders[0] / "model.safetensors").write_bytes(b"torn")
    from_step = ("--checkpoint.resume", "run/checkpoints/step-00000002")
    again = command(
        tmp_path,
        "train",
        "config.yaml",
        "--log.dir",
        "run",
        "--train.steps",
        "6",
        *asked,
        *from_step,
    )
    assert again.returncode == 0, again.stderr
    once_more = load_file(folders[0] / "model.safetensors")
    assert all(bool((theirs[name] == once_more[name]).all()) for name in theirs)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ("--checkpoint.export_every", "4"),
            "checkpoint.export_every = 4, but a checkpoint is saved at the end only",
        ),
        (
            ("--checkpoint.export_every", "5", "--checkpoint.every", "2"),
            "checkpoint.export_every = 5, but a checkpoint is saved every 2 steps",
        ),
    ],
)
def test_exports_without_checkpoints_are_refused(
    keys: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    refused = command(tmp_path, "train", "config.yaml", *keys)
    assert refused.returncode == 2 and refused.stderr.startswith(said)
    fix = refused.stderr.partition("fix: ")[2].split()
    assert (
        command(tmp_path, "train", "config.yaml", *keys, *fix, "--print-config").returncode == 0
    )
