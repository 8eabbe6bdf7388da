"""Edits of a run's own records: each is refused in words, or changes nothing that a resume does."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks.keeping import Miniature, write_corpus
from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import Author, Identity, Journal
from threefold.checkpoint.manifest import changes, read_manifest
from threefold.checkpoint.seal import Seal, checksum_of
from threefold.checkpoint.tensor_index import Index
from threefold.config.loading import load
from threefold.errors import CheckpointError, DataError, ThreefoldError
from threefold.export.model_folder import described
from threefold.run import resume_choice
from threefold.run.checkpointer import rate_of

pytestmark = pytest.mark.ranks

VALUES = (
    None,
    -1,
    0,
    7,
    10**30,
    -(10**30),
    1.5,
    float("inf"),
    "x",
    "",
    "/",
    "10",
    [],
    [[]],
    {},
    {"x": 1},
    True,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that was accepted, with the checkpoints of steps 1 and 2; step 2 is the best."""
    parent = tmp_path_factory.mktemp("forged")
    write_corpus(parent)
    run = Miniature((1, 1, 1, 1), str(parent / "run"))
    accepted = run.folder.accept(run.config)
    run.checkpointer.folder = dataclasses.replace(
        run.folder, author=Author(**accepted["author"])
    )
    for step in (1, 2):
        run.advance(1)
        run.checkpointer.save(step, 3.0 - step, True)
    run.checkpointer.saver.wait()
    run.mesh.close()
    return parent / "run"


@pytest.fixture
def resumed(saved: Path) -> Iterator[Miniature]:
    run = Miniature((1, 1, 1, 1), str(saved))
    yield run
    run.mesh.close()


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def edited(values: Any, draw: random.Random, *, but: str = "") -> str:
    """Changes one value inside `values`, or removes it; returns what."""
    path = draw.choice([path for path in places(values) if path[0] != but])
    inside = values
    for key in path[:-1]:
        inside = inside[key]
    if draw.random() < 0.2:
        del inside[path[-1]]
        return f"{path} removed"
    inside[path[-1]] = draw.choice(VALUES)
    return f"{path} = {inside[path[-1]]!r}"


def sealed_anew(checkpoint: Path, manifest: dict[str, Any]) -> None:
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = Seal(len(content), checksum_of(content)).to_json()
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMPLETE").write_text(f"2 {checksum_of(text)}\n")


@pytest.mark.parametrize("record", ["manifest", "index"])
def test_strangers_checkpoint_is_read_or_refused_in_words(
    resumed: Miniature, tmp_path: Path, record: str
) -> None:
    """All its checksums are right, as a forger makes them; what it says is taken for no more than it is."""
    whole = resumed.folder.path / "checkpoints" / "step-00000002"
    forged = Path(shutil.copytree(whole, tmp_path / "step-00000002"))
    checkpoint = Checkpoint(forged, 2)
    folder = dataclasses.replace(resumed.folder, resume=checkpoint, accepts_changes=True)
    refused = 0
    for seed in range(300):
        manifest, index = (
            json.loads((whole / "manifest.json").read_text()),
            (whole / "state/index.json").read_text(),
        )
        draw, tensors = random.Random(seed), json.loads(index)
        what = f"{seed}: {edited(manifest, draw, but='files') if record == 'manifest' else edited(tensors, draw)}"
        (forged / "state/index.json").write_text(json.dumps(tensors))
        sealed_anew(forged, manifest)
        resumed.checkpointer.folder = folder
        try:
            try:
                if (reason := checkpoint.damage()) is not None:
                    assert (
                        "('format',)" in what and "which this release does not read" in reason
                    ), what
                    refused += 1
                    continue
                resumed.checkpointer.resume()
                rate_of(resumed.config, folder)
                described(checkpoint, False)
            except ThreefoldError as error:
                assert all(problem.fix for problem in error.problems), what
                refused += 1
        except BaseException as error:
            raise AssertionError(what) from error
    assert refused > 60, refused


@pytest.mark.parametrize(
    ("name", "value"), [("position", 10**30), ("epoch", 10**30), ("position", 10**6)]
)
def test_place_beyond_the_order_is_refused(resumed: Miniature, name: str, value: int) -> None:
    state = {**resumed.loader.state_dict(), name: value}
    with pytest.raises(
        DataError,
        match=r"at position 1,000,000 of epoch 0|is not a saved order of samples: it has",
    ):
        resumed.loader.load_state_dict(state)


def test_chunks_that_overlap_and_leave_a_hole_are_refused(saved: Path, tmp_path: Path) -> None:
    state = Path(shutil.copytree(saved / "checkpoints/step-00000002/state", tmp_path / "state"))
    index = json.loads((state / "index.json").read_text())
    name, (dtype, shape, ((file, start, offsets, _),)) = next(
        (name, entry)
        for name, entry in index["tensors"].items()
        if len(entry[1]) == 2 and entry[1][0] % 2 == 0
    )
    half = [shape[0] // 2, shape[1]]
    index["tensors"][name] = [
        dtype,
        shape,
        [[file, start, offsets, half], [file, start, offsets, half]],
    ]
    (state / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="chunks overlap, and leave a hole"):
        Index.read(state)


def test_layers_without_tensors_are_refused_at_once(saved: Path, tmp_path: Path) -> None:
    forged = Path(
        shutil.copytree(saved / "checkpoints/step-00000002", tmp_path / "step-00000002")
    )
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["architecture"]["num_hidden_layers"] = 100_000
    sealed_anew(forged, manifest)
    with pytest.raises(CheckpointError, match="has 100,000 layers, but its files hold"):
        described(Checkpoint(forged, 2), False)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One edit of the kinds that disks, copies and hands make."""
    changed, place = bytearray(content), draw.randrange(len(content))
    kind = draw.choice(["flip", "flip", "cut", "insert", "zero", "empty", "lines", "digit"])
    if kind == "flip":
        changed[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed[place:place] = draw.randbytes(draw.randrange(1, 9))
    elif kind == "zero":
        changed[place : place + 64] = bytes(len(changed[place : place + 64]))
    elif kind == "empty":
        changed.clear()
    elif kind == "lines":
        lines = content.splitlines(keepends=True)
        changed = bytearray(b"".join(draw.sample(lines, draw.randrange(len(lines) + 1))))
    else:
        digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
        changed[draw.choice(digits)] = ord(str(draw.randrange(10)))
    return bytes(changed)


def taken(run: Path) -> Any:
    """What a start takes from the records: where it resumes, its config, the best checkpoint and the run's id."""
    config = load(str(run / "config.yaml"), environ={}).config
    changed = [] if config.log.dir == str(run) else ["log.dir"]
    changed += changes(read_manifest(Checkpoint(run / "checkpoints/step-00000002", 2)), config)
    asked = load(None, [("log.dir", str(run))], environ={}).config
    identity = Identity.read(run)
    Journal(run).lines()
    return (
        resume_choice.of(asked, run),
        changed,
        CheckpointFolder(run).best(),
        identity and (identity.id, identity.origin),
    )


@pytest.mark.parametrize(
    "name", ["run.json", "journal.jsonl", "config.yaml", "checkpoints/best.json"]
)
def test_edit_of_a_record_is_found_or_harmless(saved: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace(str(saved), str(run))
    )
    content, expected, found = (run / name).read_bytes(), taken(run), 0
    assert expected[1] == [] and expected[2] == (2, 1.0)
    for seed in range(150):
        (run / name).write_bytes(damaged(content, random.Random(seed)))
        try:
            if taken(run) != expected:
                # A config may be edited: what it changes is printed at the start, and kept in the journal.
                assert name == "config.yaml" and taken(run)[1], seed
                found += 1
        except ThreefoldError:
            found += 1
    assert found > 60 or name == "journal.jsonl"
