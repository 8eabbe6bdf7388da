"""The whole texts of the errors about checkpoints: what is wrong, what was expected, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from threefold.checkpoint import background_saver
from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.manifest import architecture_of, read_manifest, refuse_other
from threefold.checkpoint.seal import checksum_of
from threefold.checkpoint.state import fit
from threefold.checkpoint.tensor_index import Box, Chunk, Entry, Index
from threefold.checkpoint.tensors import read_box
from threefold.config.loading import validate
from threefold.errors import EXIT_FAILED, EXIT_WRONG_REQUEST, CheckpointError, ThreefoldError
from threefold.run.folder import RunFolder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text(act: Callable[[], Any], kind: type[ThreefoldError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.exit_code == (
        EXIT_WRONG_REQUEST if kind is CheckpointError else EXIT_FAILED
    )
    return str(caught.value)


def problem(what: str, expected: str, fix: str) -> str:
    return f"{what}\n  expected: {expected}\n  fix: {fix}"


def saved(step: int = 5) -> Checkpoint:
    checkpoints = CheckpointFolder(Path("run"))
    checkpoints.begin(step)
    return checkpoints.commit(step, {})


def forge(checkpoint: Checkpoint, **changes: Any) -> None:
    content = json.dumps(
        json.loads((checkpoint.path / "manifest.json").read_text()) | changes
    ).encode()
    (checkpoint.path / "manifest.json").write_bytes(content)
    (checkpoint.path / "COMPLETE").write_text(f"{checkpoint.step} {checksum_of(content)}\n")


def test_changed_manifest() -> None:
    checkpoint = saved()
    (checkpoint.path / "manifest.json").write_text("{}")
    assert text(checkpoint.manifest) == problem(
        "run/checkpoints/step-00000005/manifest.json cannot be read: the marker was written for another manifest",
        "the manifest that was written with the checkpoint",
        "remove run/checkpoints/step-00000005, and resume from an older checkpoint",
    )


def test_another_model_is_one_problem() -> None:
    """A run of one's own model was asked to resume with the default one: a block for each of sixteen keys."""
    checkpoint = saved()
    Path("run/config.yaml").touch()
    model = {"name_or_path": "my-qwen"}
    then = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=2, head_dim=8, vocab_size=99
    )
    now = LlamaConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=8, vocab_size=257
    )
    config = validate({"model": model})
    manifest = {
        "config": config.model_dump(mode="json"),
        "seed": 0,
        "architecture": architecture_of(then),
    }
    what = (
        "the checkpoint run/checkpoints/step-00000005 has the model my-qwen with num_hidden_layers = 3, this run 4; "
        "hidden_size = 64, this run 128; num_attention_heads = 2, this run 8; 3 more keys differ"
    )
    expected = "the same model: its tensors would not fit, or would mean something else"
    assert text(lambda: refuse_other(manifest, validate({}), now, checkpoint)) == problem(
        what,
        expected,
        "threefold resume run   to resume the run, or another folder for a new one",
    )
    # Its files were changed since: to resume the run leads here again.
    assert text(lambda: refuse_other(manifest, config, now, checkpoint)) == problem(
        what,
        expected,
        "restore its config.json, or name the revision: --model.revision COMMIT, or another folder for a new one",
    )
    refuse_other(manifest, config, then, checkpoint)


def test_manifest_of_another_release() -> None:
    checkpoint = saved()
    forge(checkpoint, format=9)
    assert text(checkpoint.manifest) == problem(
        "run/checkpoints/step-00000005 has the format 9, which this release does not read",
        "format 2",
        "resume with the release of threefold that wrote it, or start a new run",
    )


def test_manifest_that_leads_outside() -> None:
    checkpoint = saved()
    forge(checkpoint, files={"../x": [1, "0"]})
    assert text(checkpoint.seals) == problem(
        "run/checkpoints/step-00000005/manifest.json cannot be read: '../x' is not a file of a checkpoint",
        "the manifest that was written with the checkpoint",
        "remove run/checkpoints/step-00000005, and resume from an older checkpoint",
    )


def test_manifest_without_a_field() -> None:
    checkpoint = saved()
    assert text(lambda: read_manifest(checkpoint)) == problem(
        "the manifest of run/checkpoints/step-00000005 has no mesh",
        "what `threefold train` writes",
        "use another checkpoint",
    )


def test_checkpoint_that_a_run_removed_before_it_was_read_is_not_damaged() -> None:
    """As an evaluation of a run that saves often finds it."""
    checkpoint = saved()
    saved(10)
    shutil.rmtree(checkpoint.path)
    assert text(checkpoint.refuse_damage) == problem(
        "run/checkpoints/step-00000005 has been removed meanwhile",
        "a checkpoint that is kept: a run keeps its newest ones and its best",
        "its run has kept run/checkpoints/step-00000010",
    )


@pytest.mark.parametrize("asked", [True, False])
def test_no_undamaged_checkpoint(asked: bool) -> None:
    passed = [
        (Checkpoint(Path(f"run/checkpoints/step-{step:08d}"), step), f"reason {step}")
        for step in (6, 5)
    ]
    for checkpoint, _ in passed:
        checkpoint.path.mkdir(parents=True)
    folder = RunFolder(Path("run"), None, tuple(checkpoint for checkpoint, _ in passed), asked)
    expected = (
        problem(
            "the checkpoint run/checkpoints/step-00000006 is damaged: reason 6",
            "the files as they were written, with the recorded sizes and checksums",
            "copy it again from its source, or use another; `ls RUN/checkpoints` lists what a run has kept",
        )
        if asked
        else problem(
            "no checkpoint in run/checkpoints is undamaged: step-00000006: reason 6; step-00000005: reason 5",
            "at least one checkpoint as it was written; otherwise the run would restart at step 1",
            "restore one from a copy, or --log.dir ANOTHER_FOLDER for a new run",
        )
    )
    assert text(lambda: folder.resuming(None, passed)) == expected


@pytest.mark.parametrize(
    ("file", "chunk", "why"),
    [
        ("a/b", [0, 0, [0], [3]], "'a/b' is not a file of this folder"),
        ("x", [0, 0, [0], [3]], "a chunk reaches beyond the end of x"),
        ("x", [0, 0, [0], [2]], "the chunks do not add up to the tensor"),
    ],
)
def test_index_that_is_none(file: str, chunk: list[Any], why: str) -> None:
    Path("run/state").mkdir(parents=True)
    Path("run/state/x").write_bytes(bytes(8))
    content = {"files": [file], "tensors": {"w": ["F32", [3], [chunk]]}}
    Path("run/state/index.json").write_text(json.dumps(content))
    assert text(lambda: Index.read(Path("run/state"))) == problem(
        f"run/state/index.json is not an index of a checkpoint: {why}",
        "the index that was written with the checkpoint",
        "use another checkpoint than run",
    )


def test_tensor_of_another_shape() -> None:
    index = Index({"model.a": Entry("F32", (4, 2)), "model.b": Entry("BF16", (2,))})
    state = {"model.a": torch.zeros(4, 3), "model.b": torch.zeros(2), "model.c": torch.zeros(1)}
    assert text(lambda: fit(state, index)) == problem(
        "the checkpoint has F32 [4, 2] for model.a, the model F32 [4, 3]; 2 more differ",
        "the tensors of the same model and optimizer",
        "use the model of the run, or another folder for a new one",
    )
    assert text(lambda: fit({"model.c": state["model.c"]}, index)).startswith(
        "the checkpoint has nothing for model.c, the model F32 [1]\n"
    )


def test_file_that_changes_while_it_is_read() -> None:
    Path("x").write_bytes(bytes(8))
    box = Box((0,), (4,))
    entry = Entry("F32", (4,), [Chunk("x", 0, box)])
    fix = "check whether another program changes the folder, and resume again"
    expected = "the file as it was when its checksum was compared"
    target = torch.zeros(4)
    assert text(lambda: read_box(Path(), entry, box, target)) == problem(
        "x cannot be read: it is truncated", expected, fix
    )
    Path("x").unlink()
    assert text(lambda: read_box(Path(), entry, box, target)) == problem(
        "x cannot be read: No such file or directory", expected, fix
    )


def test_save_that_failed() -> None:
    failure = {"step": 7, "reason": "rank 3: No space left on device (while writing) on host"}
    assert str(background_saver._failed(failure)) == problem(
        "the checkpoint of step 7 could not be saved: rank 3: No space left on device (while writing) on host",
        "enough space, and a folder that every rank can write; earlier checkpoints are intact",
        "free space or make the folder writable (`df -h RUN`, `ls -ld RUN`) and start the run again: it resumes; "
        "or, to continue without a checkpoint if a save fails, --checkpoint.on_error continue",
    )
