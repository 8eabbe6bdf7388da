"""A damaged checkpoint is never loaded: it is found, said, and the one before is taken."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.keeping import Miniature, write_corpus
from ranks.mutations import mutate
from ranks.runs import command, curve, prepare
from ranks.spawn import run_ranks
from threefold.checkpoint.checkpoint_folder import (
    Checkpoint,
    CheckpointFolder,
    newest_undamaged,
)
from threefold.checkpoint.seal import Seal, checksum_of
from threefold.errors import CheckpointError

SEEDS = range(1000, 1020)
BRIEFLY = 4


def _two_checkpoints(folder: str) -> None:
    run = Miniature((1, 2, 1, 1), folder)
    for step in (1, 2):
        run.advance(1)
        run.checkpointer.save(step, None, True)
    run.checkpointer.saver.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with the checkpoints of steps 1 and 2."""
    parent = tmp_path_factory.mktemp("damage")
    write_corpus(parent)
    run_ranks(_two_checkpoints, 2, str(parent / "run"))
    return parent / "run"


def _opened(run: Path) -> tuple[Checkpoint | None, list[tuple[Checkpoint, str]]]:
    candidates = list(reversed(CheckpointFolder(run).all()))
    return newest_undamaged(candidates, lambda checkpoint: checkpoint.damage())


def _content(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """All that a resume takes from a checkpoint."""
    from threefold.checkpoint.manifest import read_manifest
    from threefold.checkpoint.tensor_index import Index
    from threefold.checkpoint.tensors import read_whole

    index = Index.read(checkpoint.state)
    return read_manifest(checkpoint), {
        name: read_whole(checkpoint.state, entry).numpy()
        for name, entry in index.entries.items()
    }


def _assert_same(
    content: tuple[Any, dict[str, Any]], wanted: tuple[Any, dict[str, Any]], what: str
) -> None:
    (manifest, tensors), (wanted_manifest, wanted_tensors) = content, wanted
    assert manifest == wanted_manifest, what
    assert tensors.keys() == wanted_tensors.keys(), what
    assert all(np.array_equal(tensors[name], wanted_tensors[name]) for name in tensors), what


def test_every_mutation_is_found_or_harmless(saved: Path, tmp_path: Path) -> None:
    expected = {
        checkpoint.step: _content(checkpoint) for checkpoint in CheckpointFolder(saved).all()
    }
    found = 0
    for seed in range(500):
        run = tmp_path / "run"
        newest, older = (
            run / "checkpoints" / "step-00000002",
            run / "checkpoints" / "step-00000001",
        )
        shutil.copytree(saved / "checkpoints" / newest.name, newest)
        older.symlink_to(saved / "checkpoints" / older.name)
        what = mutate(newest, older, seed)
        chosen, passed = _opened(run)
        assert chosen is not None, what
        assert [checkpoint.step for checkpoint, _ in passed] == (
            [2] if chosen.step == 1 else []
        ), what
        assert all(reason and "\n" not in reason for _, reason in passed), what
        if chosen.step == 1:
            # A link to the folder that `expected` was read from, compared after the loop.
            found += 1
            assert chosen.path.samefile(saved / "checkpoints" / older.name), what
        else:
            _assert_same(_content(chosen), expected[2], what)
        shutil.rmtree(run)
    for checkpoint in CheckpointFolder(saved).all():
        _assert_same(_content(checkpoint), expected[checkpoint.step], str(checkpoint.path))
    assert found > 450  # a byte of a file swapped for an equal one changes nothing; most do


def test_steps_renamed_are_found(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step-00000002")
    shutil.copytree(folder / "step-00000001", folder / "step-00000002")
    chosen, passed = _opened(run)
    assert chosen is not None and chosen.step == 1 and len(passed) == 1


# --- what only a person would do ---------------------------------------------------------------------------------


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _sealed_anew(checkpoint: Path, **changes: Any) -> None:
    """Changes the manifest, and makes all checksums right again, as only a forger does."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    for name in manifest["files"] if isinstance(manifest.get("files"), dict) else ():
        if (checkpoint / name).is_file():
            content = (checkpoint / name).read_bytes()
            manifest["files"][name] = Seal(len(content), checksum_of(content)).to_json()
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMPLETE").write_text(f"{int(checkpoint.name[5:])} {checksum_of(text)}\n")


@pytest.fixture
def forged(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of step 2, to be forged."""
    return Path(
        shutil.copytree(saved / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    )


@pytest.mark.parametrize("file", ["index.json", "rank-00000.safetensors", ".metadata"])
def test_pickle_in_the_place_of_a_file_is_not_run(
    forged: Path, tmp_path: Path, file: str
) -> None:
    (forged / "state" / file).write_bytes(pickle.dumps(_Evil(tmp_path / "ran")))
    _sealed_anew(forged)
    checkpoint = Checkpoint(forged, 2)
    assert checkpoint.damage() is None, "the seals are right"
    if file == ".metadata":
        _content(checkpoint)
    else:
        with pytest.raises(
            CheckpointError, match=r"index\.json is not an index of a checkpoint"
        ):
            _content(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_no_pickle_is_read_anywhere_in_the_package() -> None:
    import threefold

    source = Path(threefold.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        if path == source / "convert" / "dcp_reader.py":
            # Other programs' checkpoints: by an unpickler that finds no class, and tensors alone.
            text = text.replace("import pickle\n", "").replace(
                "torch.load(io.BytesIO(content), map_location=", ""
            )
            assert text.count("weights_only=True)") == 1
        if path == source / "convert" / "universal.py":
            # DeepSpeed's: tensors and plain values alone.
            assert (
                text.count('torch.load(path, map_location="cpu", weights_only=True, mmap=True)')
                == 1
            )
            text = text.replace("torch.load(path, map_location=", "").replace(
                "torch.load has no", ""
            )
        if path == source / "explain" / "sources" / "dumps.py":
            # Dumps of torch's Flight Recorder: by an unpickler that finds no class at all.
            text = text.replace("import pickle\n", "")
            assert (
                text.count("pickle._Unpickler") == 1
                and "def find_class(" in text
                and "def persistent_load(" in text
            )
        for word in (
            "import pickle",
            "torch.load(",
            "pickle.load",
            "weights_only=False",
            "FileSystemReader",
        ):
            assert word not in text, f"{path} {word}"


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../../etc/passwd": [1, "0"]}},
        {"files": {"/etc/passwd": [1, "0"]}},
        {"files": {"state/a\x00b": [1, "0"]}},
        {"files": {"state/x": ["1", 0]}},
        {"files": None},
        {"files": 5},
        {"format": 1},
        {"format": []},
    ],
    ids=str,
)
def test_forged_manifest_is_refused(forged: Path, change: dict[str, Any]) -> None:
    _sealed_anew(forged, **change)
    reason = Checkpoint(forged, 2).damage()
    assert reason is not None and str(forged) in reason


@pytest.mark.parametrize(
    "text", [b"5", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"format": 2}']
)
def test_manifest_that_is_none_is_refused(forged: Path, text: bytes) -> None:
    (forged / "manifest.json").write_bytes(text)
    (forged / "COMPLETE").write_text(f"2 {checksum_of(text)}\n")
    assert Checkpoint(forged, 2).damage() is not None


@pytest.mark.parametrize("name", ["step", "mesh", "data", "seed", "architecture", "config"])
def test_forged_field_is_refused(forged: Path, name: str) -> None:
    from threefold.checkpoint.manifest import read_manifest

    _sealed_anew(forged, **{name: None})
    with pytest.raises(CheckpointError, match=f"the manifest of .* has no {name}"):
        read_manifest(Checkpoint(forged, 2))


@pytest.mark.parametrize(
    "entry",
    [
        ["F32", [4], [[0, 10**9, [0], [4]]]],
        ["F32", [4], [[0, -8, [0], [4]]]],
        ["F32", [4], [[7, 0, [0], [4]]]],
        ["F32", [4], [[0, 0, [2], [4]]]],
        ["F32", [4], [[0, 0, [0], [2]]]],
        ["F32", [4], [[0, 0, [0, 0], [4, 1]]]],
        ["F32", [10**15], [[0, 0, [0], [10**15]]]],
        ["OBJECT", [4], [[0, 0, [0], [4]]]],
        ["F32", [True], [[0, 0, [0], [1]]]],
        ["F32", "4", []],
        None,
        [],
    ],
    ids=str,
)
def test_forged_index_is_refused(forged: Path, entry: Any) -> None:
    from threefold.checkpoint.tensor_index import Index

    path = forged / "state" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "tensors": {"model.x": entry}}))
    with pytest.raises(CheckpointError, match="is not an index of a checkpoint"):
        Index.read(forged / "state")


def test_index_leads_to_no_file_outside(forged: Path) -> None:
    from threefold.checkpoint.tensor_index import Index

    path = forged / "state" / "index.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "files": ["../../../../etc/passwd"] * 2})
    )
    with pytest.raises(CheckpointError, match="is not a file of this folder"):
        Index.read(forged / "state")


# --- through the command -----------------------------------------------------------------------------------------

ALONE = ("--mesh.dp", "1", "--train.steps", "6", "--checkpoint.every", "2", "--log.dir", "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with the checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("command")
    prepare(folder)
    done = command(folder, "train", "config.yaml", *ALONE)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "seed",
    [
        seed if place < BRIEFLY else pytest.param(seed, marks=pytest.mark.long)
        for place, seed in enumerate(SEEDS)
    ],
)
def test_run_goes_back_to_the_checkpoint_before(run: Path, seed: int) -> None:
    before = curve(run)
    untouched = run.parent / "untouched"
    shutil.copytree(run, untouched)
    try:
        checkpoints = run / "checkpoints"
        what = mutate(checkpoints / "step-00000006", checkpoints / "step-00000004", seed)
        done = command(run.parent, "train", "config.yaml", *ALONE)
        assert done.returncode == 0, what + done.stderr
        assert "Traceback" not in done.stderr
        if "nothing to do" not in done.stdout:
            assert (
                f"skipped {Path('run') / 'checkpoints' / 'step-00000006'}: " in done.stderr
            ), what
            assert "resumed from run/checkpoints/step-00000004" in done.stdout, what
            assert "set aside: run/checkpoints/aside-1-step-00000006" in done.stdout, what
            assert CheckpointFolder(run).all()[-1].damage() is None
        assert curve(run) == before, what
    finally:
        shutil.rmtree(run)
        untouched.rename(run)


def test_damaged_checkpoint_that_was_asked_for_is_refused(run: Path) -> None:
    asked = shutil.copytree(run / "checkpoints" / "step-00000006", run.parent / "step-00000006")
    file = asked / "state" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    config = (run / "config.yaml").read_bytes()
    arguments = (
        "--train.steps",
        "7",
        "--checkpoint.resume",
        "step-00000006",
        "--optimizer.lr",
        "1e-4",
    )
    for log_dir in ("run", "new"):
        done = command(
            run.parent, "train", "config.yaml", *ALONE, *arguments, "--log.dir", log_dir
        )
        assert done.returncode == 2
        assert done.stderr == (
            "the checkpoint step-00000006 is damaged: the content of state/rank-00000.safetensors has changed: its "
            "checksum is not the one it was written with\n"
            "  expected: the files as they were written, with the recorded sizes and checksums\n"
            "  fix: copy it again from its source, or use another; `ls RUN/checkpoints` lists what a run has kept\n"
        )
    assert (run / "config.yaml").read_bytes() == config
    assert not (run.parent / "new").exists()


def test_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(run: Path) -> None:
    folder = Path(shutil.copytree(run, run.parent / "lost"))
    for marker in folder.glob("checkpoints/*/COMPLETE"):
        marker.write_text("0\n")
    done = command(run.parent, "train", "config.yaml", *ALONE, "--log.dir", "lost")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "no checkpoint in lost/checkpoints is undamaged: step-00000006: "
    )
    assert (
        "\n  fix: restore one from a copy, or --log.dir ANOTHER_FOLDER for a new run\n"
        in done.stderr
    )
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
