"""Checkpoints on disk: what is not whole is never taken for whole, and what is kept is what was promised."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from threefold.checkpoint.checkpoint_folder import (
    Checkpoint,
    CheckpointFolder,
    find,
    newest_undamaged,
)
from threefold.checkpoint.lineage import Identity
from threefold.checkpoint.seal import write_sealed
from threefold.errors import CheckpointError

AUTHOR = {"run": "of a test", "start": 1, "link": "0" * 32}


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(tmp_path / "run")
    folder.path.mkdir(parents=True)
    return folder


def save(checkpoints: CheckpointFolder, step: int, content: str = "weights") -> Checkpoint:
    seal = write_sealed(checkpoints.begin(step) / "state" / "0.distcp", content.encode())
    return checkpoints.commit(step, AUTHOR, {"state/0.distcp": seal})


def steps(checkpoints: CheckpointFolder) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.complete()]


class Interrupted(Exception):
    """The process ends here."""


def test_committed_checkpoint_is_whole(checkpoints: CheckpointFolder) -> None:
    saved = save(checkpoints, 100)
    assert saved.path == checkpoints.path / "step-00000100"
    assert (saved.state / "0.distcp").read_text() == "weights"
    assert {**saved.manifest(), "files": {}} == {
        "format": 2,
        "step": 100,
        **AUTHOR,
        "files": {},
    }
    assert [*saved.seals()] == ["state/0.distcp"]
    assert checkpoints.complete() == [saved]
    assert os.listdir(checkpoints.path) == ["step-00000100"]


def test_newest_is_by_step_and_not_by_time_or_name(checkpoints: CheckpointFolder) -> None:
    assert checkpoints.newest() is None
    for step in (20, 3, 100_000_000, 99_999_999):
        save(checkpoints, step)
    assert steps(checkpoints) == [3, 20, 99_999_999, 100_000_000]
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 100_000_000


def test_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "nothing")
    assert (
        checkpoints.complete() == []
        and checkpoints.newest() is None
        and checkpoints.best() is None
    )
    assert not (tmp_path / "nothing").exists()


def test_partial_folder_is_never_complete(checkpoints: CheckpointFolder) -> None:
    partial = checkpoints.begin(5)
    assert steps(checkpoints) == []
    (partial / "state" / "0.distcp").write_text("half")
    (partial / "COMPLETE").write_text("5\n")  # killed between the marker and the new name
    assert steps(checkpoints) == []
    with pytest.raises(CheckpointError):
        find(partial)


def test_folder_without_marker_is_not_complete(checkpoints: CheckpointFolder) -> None:
    saved = save(checkpoints, 5)
    (saved.path / "COMPLETE").unlink()
    assert steps(checkpoints) == []
    with pytest.raises(CheckpointError):
        find(saved.path)


@pytest.mark.parametrize(
    "name", ["step-", "step-00000005-copy", "step-five", "step-²", "old-step-00000005", "5"]
)
def test_folder_of_another_name_is_the_users(checkpoints: CheckpointFolder, name: str) -> None:
    shutil.copytree(save(checkpoints, 5).path, checkpoints.path / name)
    assert steps(checkpoints) == [5]
    checkpoints.prune(1)
    assert (checkpoints.path / name / "COMPLETE").exists()


def test_begin_removes_what_a_broken_save_left(checkpoints: CheckpointFolder) -> None:
    (checkpoints.begin(5) / "state" / "stale").touch()
    partial = checkpoints.begin(5)
    assert list((partial / "state").iterdir()) == []


def test_saving_a_step_again_replaces_it(checkpoints: CheckpointFolder) -> None:
    save(checkpoints, 5, "first")
    again = save(checkpoints, 5, "second")
    assert (again.state / "0.distcp").read_text() == "second"
    assert os.listdir(checkpoints.path) == ["step-00000005"]


def test_prune_keeps_the_newest(checkpoints: CheckpointFolder) -> None:
    for step in range(1, 6):
        save(checkpoints, step)
    checkpoints.prune(7)
    assert steps(checkpoints) == [1, 2, 3, 4, 5]
    checkpoints.prune(2)
    assert steps(checkpoints) == [4, 5]
    assert sorted(os.listdir(checkpoints.path)) == ["step-00000004", "step-00000005"]


def test_prune_keeps_the_best(checkpoints: CheckpointFolder) -> None:
    for step in range(1, 6):
        save(checkpoints, step)
    checkpoints.mark_best(2, 1.5)
    checkpoints.prune(1)
    assert steps(checkpoints) == [2, 5]
    checkpoints.mark_best(5, 1.25)
    save(checkpoints, 6)
    checkpoints.prune(1)
    assert steps(checkpoints) == [5, 6]


def test_prune_keeps_what_a_damaged_manifest_does_not_show_to_be_the_runs(
    checkpoints: CheckpointFolder,
) -> None:
    own = Identity.new()
    own.write(checkpoints.path.parent)
    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, asdict(own.author))
    (checkpoints.path / "step-00000001" / "manifest.json").write_text("{")
    checkpoints.prune(1)
    assert steps(checkpoints) == [1, 3]


def test_prune_removes_the_older_of_a_loop_without_a_run(checkpoints: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, {})
    checkpoints.prune(1)
    assert steps(checkpoints) == [3]


def test_prune_removes_what_broken_saves_left_and_nothing_that_is_being_copied(
    checkpoints: CheckpointFolder,
) -> None:
    save(checkpoints, 1)
    (save(checkpoints, 2).path / "COMPLETE").unlink()  # cp or rsync have not brought it yet
    checkpoints.begin(3)
    save(checkpoints, 4)
    checkpoints.prune(2)
    assert sorted(os.listdir(checkpoints.path)) == [
        "step-00000001",
        "step-00000002",
        "step-00000004",
    ]


def test_link_and_what_it_leads_to_are_left_alone(
    checkpoints: CheckpointFolder, tmp_path: Path
) -> None:
    archive = CheckpointFolder(tmp_path / "archive")
    archived = save(archive, 1)
    checkpoints.path.mkdir(parents=True, exist_ok=True)
    (checkpoints.path / "step-00000001").symlink_to(archived.path)
    for step in (2, 3):
        save(checkpoints, step)
    checkpoints.prune(1)
    assert checkpoints.set_aside_after(0) == [checkpoints.path / "aside-1-step-00000003"]
    assert archived.complete and archived.damage() is None
    assert (checkpoints.path / "step-00000001").is_symlink()


def test_checkpoint_of_another_run_is_left_alone(checkpoints: CheckpointFolder) -> None:
    own, other = Identity.new(), Identity.new()
    checkpoints.path.mkdir(parents=True, exist_ok=True)
    own.write(checkpoints.path.parent)
    for step, run in ((1, other), (2, own), (3, own)):
        checkpoints.begin(step)
        checkpoints.commit(step, asdict(run.author))
    checkpoints.prune(1)
    assert [each.step for each in checkpoints.complete()] == [3]
    assert [each.step for each in checkpoints.foreign()] == [1]
    assert checkpoints.set_aside_after(0) == [checkpoints.path / "aside-1-step-00000003"]


@pytest.mark.parametrize("kind", ["files", "another run's", "link"])
def test_what_this_run_did_not_write_is_not_replaced_by_a_save(
    checkpoints: CheckpointFolder, kind: str
) -> None:
    """A save of its name fails, also if it was copied in while the run was going."""
    place = checkpoints.path / "step-00000005"
    if kind == "link":
        place.symlink_to(checkpoints.path.parent)
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    if kind == "another run's":
        (place / "manifest.json").write_text(json.dumps(asdict(Identity.new().author)))
        (place / "COMPLETE").touch()
    before = sorted(place.iterdir())
    with pytest.raises(
        FileExistsError,
        match=r"move it away: this start did not write it: '.*/step-00000005'",
    ):
        save(checkpoints, 5)
    assert sorted(place.iterdir()) == before and place.is_symlink() == (kind == "link")


def test_what_no_manifest_shows_to_be_this_runs_is_kept(checkpoints: CheckpointFolder) -> None:
    own = Identity.new()
    own.write(checkpoints.path.parent)
    for step, run in ((1, {}), (2, asdict(own.author)), (3, asdict(own.author))):
        checkpoints.begin(step)
        checkpoints.commit(step, run)
    (checkpoints.path / "step-00000004").mkdir()
    checkpoints.prune(1)
    assert checkpoints.set_aside_after(3) == []
    assert sorted(os.listdir(checkpoints.path)) == [
        "step-00000001",
        "step-00000003",
        "step-00000004",
    ]


def test_removal_cut_short_is_not_complete(
    checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens when the first file is gone: the rest does not look whole, and the next removal ends it."""
    for step in (1, 2):
        save(checkpoints, step)

    def interrupted(path: Path, **_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(Interrupted):
            checkpoints.prune(1)
    assert list(checkpoints.path.glob(".step-00000001.*/state/0.distcp"))
    assert steps(checkpoints) == [2]
    checkpoints.prune(1)
    assert os.listdir(checkpoints.path) == ["step-00000002"]


def test_replacement_cut_short_is_not_complete(
    checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 1)
    save(checkpoints, 2, "first")
    (checkpoints.begin(2) / "state" / "0.distcp").write_text("second")

    def interrupted(path: Path, **_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(Interrupted):
        checkpoints.commit(2, AUTHOR)
    assert steps(checkpoints) == [1]


def test_best_reads_back(checkpoints: CheckpointFolder) -> None:
    assert checkpoints.best() is None
    checkpoints.mark_best(7, 0.1 + 0.2)
    assert checkpoints.best() == (7, 0.1 + 0.2)
    checkpoints.mark_best(8, 0.25)
    assert checkpoints.best() == (8, 0.25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"step": 1}',
        '{"step": 1, "eval_loss": null, "checksum": "0"}',
        "5",
    ],
)
def test_damaged_record_of_the_best_is_refused(
    checkpoints: CheckpointFolder, text: str
) -> None:
    (checkpoints.path / "best.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read: "):
        checkpoints.best()


def test_find_takes_a_run_or_a_checkpoint(checkpoints: CheckpointFolder) -> None:
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    assert find(checkpoints.path.parent) == second
    assert find(first.path) == first


def test_find_refuses_what_holds_nothing_complete(
    checkpoints: CheckpointFolder, tmp_path: Path
) -> None:
    for path in (tmp_path / "nothing", checkpoints.path.parent, checkpoints.path):
        with pytest.raises(CheckpointError, match="no complete checkpoint in"):
            find(path)


@pytest.mark.parametrize("text", [None, "", "{"])
def test_manifest_that_cannot_be_read_is_named(
    checkpoints: CheckpointFolder, text: str | None
) -> None:
    saved = save(checkpoints, 1)
    manifest = saved.path / "manifest.json"
    manifest.unlink()
    if text is not None:
        manifest.write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        saved.manifest()


def test_prune_keeps_the_newest_and_the_best(checkpoints: CheckpointFolder) -> None:
    for step in range(1, 9):
        save(checkpoints, step)
    checkpoints.mark_best(4, 1.0)
    checkpoints.prune(1)
    assert steps(checkpoints) == [4, 8]


def test_undamaged_is_the_newest_as_it_was_written(checkpoints: CheckpointFolder) -> None:
    saved = [save(checkpoints, step) for step in (1, 2, 3)]
    assert all(checkpoint.damage() is None for checkpoint in saved)
    (saved[2].path / "COMPLETE").unlink()
    (saved[1].path / "manifest.json").write_text("{}")
    chosen, passed = newest_undamaged(list(reversed(checkpoints.all())), Checkpoint.damage)
    assert chosen == saved[0]
    assert [(checkpoint.step, reason.rpartition(": ")[2]) for checkpoint, reason in passed] == [
        (3, f"'{saved[2].path}/COMPLETE'"),
        (2, "the marker was written for another manifest"),
    ]


def test_marker_and_manifest_of_another_step_are_damage(checkpoints: CheckpointFolder) -> None:
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    for name in ("COMPLETE", "manifest.json"):
        shutil.copy(first.path / name, second.path / name)
    assert first.damage() is None and second.damage() is not None


def test_later_checkpoints_are_set_aside(checkpoints: CheckpointFolder) -> None:
    for _ in range(2):
        for step in (1, 2, 3):
            save(checkpoints, step)
        aside = checkpoints.set_aside_after(1)
        assert steps(checkpoints) == [1]
    assert [path.name for path in aside] == ["aside-2-step-00000002", "aside-2-step-00000003"]
    checkpoints.prune(1)
    assert sorted(os.listdir(checkpoints.path)) == [
        *(
            "aside-1-step-00000002",
            "aside-1-step-00000003",
            "aside-2-step-00000002",
            "aside-2-step-00000003",
        ),
        "step-00000001",
    ]


def test_abandoned_save_leaves_nothing(checkpoints: CheckpointFolder) -> None:
    (checkpoints.begin(5) / "state" / "half").touch()
    checkpoints.abandon(5)
    assert os.listdir(checkpoints.path) == []
