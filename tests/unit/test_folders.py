"""The table of docs/design/folders.md: every kind of folder, and what each command may do there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_audit import ONE, record
from typer.testing import CliRunner

from report_runs import step_line, write_lines
from threefold.checkpoint.checkpoint_folder import CheckpointFolder, find
from threefold.commands import main
from threefold.config import loading
from threefold.errors import ThreefoldError
from threefold.export.model_folder import Exported
from threefold.run.folder import open_run

TABLE = Path(__file__).parents[2] / "docs/design/folders.md"
PLACE = Path("place")


def _run(path: Path) -> None:
    config = loading.validate({"log": {"dir": str(path)}})
    opened = open_run(config)
    opened.begin()
    author = opened.accept(config)["author"]
    opened.checkpoints.begin(5)
    opened.checkpoints.commit(5, {**author, "data": {}})
    lines = [line.to_record() for line in record((1, 5, ONE, 8))]
    write_lines(
        path / "audit.jsonl",
        [{**line, "link": author["link"]} if "mesh" in line else line for line in lines],
    )
    opened.journal.append("save", step=5, start=1)
    write_lines(opened.metrics, [step_line(step) for step in range(1, 6)])


def _copy() -> None:
    _run(Path("original"))
    shutil.copytree("original", PLACE)


def _nameless() -> None:
    _run(PLACE)
    (PLACE / "run.json").unlink()


def _mixed() -> None:
    _run(PLACE)
    _run(Path("other"))
    shutil.copytree("other/checkpoints/step-00000005", PLACE / "checkpoints/step-00000007")
    shutil.rmtree("other")


def _emptied() -> None:
    _run(PLACE)
    shutil.rmtree(PLACE / "checkpoints")


def _begun() -> None:
    open_run(loading.validate({"log": {"dir": str(PLACE)}}))
    (PLACE / "logs/rank-0000.log").touch()
    (PLACE / "submitted.yaml").touch()


def _of_files(*names: str) -> Callable[[], None]:
    def make() -> None:
        PLACE.mkdir()
        for name in names:
            (PLACE / name).write_text("train: {steps: 1}")

    return make


KINDS: dict[str, Callable[[], Any]] = {
    "absent": lambda: None,
    "empty": PLACE.mkdir,
    "begun": _begun,
    "run": lambda: _run(PLACE),
    "copy": _copy,
    "nameless": _nameless,
    "mixed": _mixed,
    "emptied": _emptied,
    "project": _of_files("config.yaml", "notes.md"),
    "data": _of_files("a.jsonl", "b.jsonl"),
    "model": _of_files("config.json", "model.safetensors"),
    "file": PLACE.touch,
}


def table() -> dict[tuple[str, str], str]:
    """(kind, command) -> what it may do."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.read_text().splitlines()
        if line[:1] == "|"
    ]
    head, _, *body = rows
    return {
        (row[0], command): cell
        for row in body
        for command, cell in zip(head[1:], row[1:], strict=True)
    }


CELLS = table()


def files() -> dict[str, bytes | None]:
    """All that lies here, but for the lock and the pages that a command makes of a run."""
    paths = [path for path in Path().rglob("*") if path.name not in ("run.lock", "report.html")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def started(loaded: loading.LoadedConfig, **_: Any) -> int:
    """A start, as far as the folder decides; what it is asked to resume, it resumes."""
    opened = open_run(loaded.config)
    opened = opened.resuming(next(iter(opened.candidates), None), ())
    opened.begin()
    opened.accept(loaded.config)
    (PLACE / "steps").write_text(
        json.dumps([candidate.step for candidate in opened.candidates])
    )
    return 0


def exported(run: Path, to: Path, **_: Any) -> Exported:
    """An export, as far as the folders decide."""
    to.mkdir()
    return Exported(find(run).step, 1, ("model.safetensors",), "not loaded")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("threefold.run.start.train_command", started)
    # The checkpoints of this test hold no model: what matters is that one is found.
    monkeypatch.setattr("threefold.export.model_folder.export", exported)
    main._load(main._COMMANDS)


ARGUMENTS = {
    "train": ["train", "--log.dir", str(PLACE)],
    "resume": ["resume", str(PLACE)],
    "report": ["report", str(PLACE)],
    "why": ["why", str(PLACE)],
    "audit": ["data", "audit", str(PLACE)],
    "order": ["data", "order", str(PLACE), "--step", "3"],
    "export": ["export", str(PLACE), "--to", "exported"],
}


def test_every_cell_is_tried() -> None:
    assert set(CELLS) == {(kind, command) for kind in KINDS for command in ARGUMENTS}
    assert set(CELLS.values()) <= {"makes", "takes", "reads", "refuses"}


@pytest.mark.parametrize(("kind", "command"), sorted(CELLS))
def test_command_does_in_a_folder_what_the_table_says(kind: str, command: str) -> None:
    KINDS[kind]()
    before = files()
    error = CliRunner().invoke(main.app, ARGUMENTS[command]).exception
    after = {
        path: content for path, content in files().items() if not re.match("exported", path)
    }
    refused = isinstance(error, ThreefoldError)
    if CELLS[kind, command] in ("makes", "takes"):
        assert not refused, error
        resumed = json.loads((PLACE / "steps").read_text())
        assert resumed == ([5] if kind in ("run", "copy") else [])
        grows = ("config.yaml", "journal.jsonl", "run.json")
        assert {
            path: after[path] for path in before if Path(path).name not in grows
        }.items() <= before.items()
        return
    assert after == before
    assert refused == (CELLS[kind, command] == "refuses"), error
    if refused:
        assert all(problem.expected and problem.fix for problem in error.problems)


def test_answer_is_the_same_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose config names the original as its log.dir resumes itself, and one without run.json nothing."""
    _copy()
    text = Path("original/config.yaml").read_text()
    assert "dir: original" in text
    here = Path.cwd()
    Path("elsewhere").mkdir()
    original = {
        path: path.read_bytes() for path in Path("original").rglob("*") if path.is_file()
    }
    for working in (here, here / "elsewhere"):
        monkeypatch.chdir(working)
        loaded = loading.load(str(here / PLACE / "config.yaml"), environ={})
        assert loaded.config.log.dir == str(here / PLACE)
    monkeypatch.chdir(here)
    (PLACE / "run.json").unlink()
    for working in (here, here / "elsewhere"):
        monkeypatch.chdir(working)
        error = CliRunner().invoke(main.app, ["resume", str(here / PLACE)]).exception
        assert isinstance(error, ThreefoldError) and str(here / PLACE) in str(error)
    monkeypatch.chdir(here)
    assert {
        path: path.read_bytes() for path in Path("original").rglob("*") if path.is_file()
    } == original
    assert CheckpointFolder(Path("original")).newest() is not None
