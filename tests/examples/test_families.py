"""The table of architectures: a few of them in it, all columns, and what makes it fail."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.reference import compare_trainings
from ranks.spawn import run_ranks
from threefold.check.compare import Training

TABLE = Path(__file__).parents[2] / "benchmarks" / "families.py"
COLUMNS = (
    "one process",
    "tp 2",
    "cp 2 gather",
    "cp 2 ulysses",
    "dp_shard 2",
    "2x2x2",
    "the command",
)


def table(
    folder: Path, *arguments: str, timeout_s: float
) -> tuple[dict[str, dict[str, str]], str]:
    """(type -> column/rows -> cell, the page)."""
    results, page = folder / "results.json", folder / "models.md"
    done = subprocess.run(
        [
            sys.executable,
            str(TABLE),
            "--check",
            "--results",
            str(results),
            "--write",
            str(page),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text()), page.read_text()


def holds(cell: str) -> bool:
    return cell[:1].isdigit() and float(cell) <= 1


@pytest.mark.examples
def test_what_holds_and_what_is_refused(tmp_path: Path) -> None:
    columns = ("one process", "cp 2 gather", "the command")
    found, page = table(
        tmp_path, "--types", "llama", "mamba2", "musicgen", "--columns", *columns, timeout_s=240
    )
    assert all(
        holds(found["llama"][f"{column}/{rows}"])
        for column in columns[:2]
        for rows in ("causal", "documents")
    )
    assert holds(found["llama"]["the command/"])
    assert found["mamba2"]["cp 2 gather/causal"].startswith(
        "refused: mesh.cp = 2, but 'mamba2' has recurrent layers"
    )
    assert holds(found["mamba2"]["one process/causal"])
    assert "| mamba2 | " in page
    assert "- musicgen: its config is of three models" in page
    again, _ = table(
        tmp_path, "--types", "llama", "mamba2", "musicgen", "--columns", *columns, timeout_s=60
    )
    assert again == found  # from the file, without running them


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_of_each_kind_on_every_mesh(tmp_path: Path) -> None:
    found, _ = table(tmp_path, timeout_s=900)
    assert len(found) == 8
    for name, cells in found.items():
        assert {key.split("/")[0] for key in cells} == set(COLUMNS)
        assert holds(cells["one process/causal"]), name
        assert holds(cells["the command/"]), name
    for column in COLUMNS[:-1]:
        assert holds(found["llama"][f"{column}/documents"])


class _OneRank:
    """A mesh of one rank."""

    def share(self, name: str, make: Any) -> Any:
        return make()

    def decide(self, name: str, part: Any, conclude: Any) -> Any:
        return conclude([part])


@pytest.mark.parametrize(
    ("curves", "cell", "tried"),
    [
        ([(1.0, 1.0)], "0.000", 1),
        ([(1.1, 1.0), (1.0, 1.0)], "wrong: 1e+03 (loss)", 1),
        ([(1.0, 1.1), (1.0, 1.0)], "0.000", 2),
        ([(1.0, 1.1), (1.0, 1.1), (1.0, 1.0)], "0.000", 3),
        ([(1.0, 1.1), (1.0, 1.1), (1.0, 1.1)], "wrong: 1e+03 (loss)", 3),
    ],
    ids=["holds", "in step 1", "once in step 2", "twice in step 2", "always in step 2"],
)
def test_what_begins_after_the_first_step_is_confirmed_with_other_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    curves: list[tuple[float, float]],
    cell: str,
    tried: int,
) -> None:
    script: dict[str, Any] = runpy.run_path(str(TABLE))
    folders: list[Path] = []

    def compared(name: str, kind: str, folder: Path, mesh: Any, column: str) -> Any:
        folders.append(folder)
        sides = [
            Training([*losses], [1.0, 1.0], {"w": torch.ones(2)})
            for losses in (curves[len(folders) - 1], (1, 1))
        ]
        return compare_trainings(*sides)

    act = script["_compare"]
    monkeypatch.setitem(act.__globals__, "_compared", compared)
    monkeypatch.setitem(act.__globals__, "_prepare", lambda *_, seed: "ready")
    assert act("llama", "causal", tmp_path, _OneRank(), "cp 2 gather") == cell
    assert len({*folders}) == len(folders) == tried


def _with_a_faster_optimizer(folder: str) -> str:
    sys.path.insert(0, str(TABLE.parent))
    import families
    import threefold
    from threefold.training.step import TrainStep

    mesh = threefold.init_mesh(cp=2, device="cpu")
    mesh.share(
        "model", lambda: families._prepare("llama", "", Path(folder), mesh, "one process")
    )
    plain = TrainStep._update
    TrainStep._update = lambda step, norm, lr: plain(step, norm, 1.1 * (lr or 0.0))  # type: ignore[method-assign]
    return families._compare("llama", "causal", Path(folder), mesh, "cp 2 gather")


@pytest.mark.ranks
def test_a_fault_of_the_update_is_wrong_with_all_weights(tmp_path: Path) -> None:
    assert all(
        cell.startswith("wrong: ")
        for cell in run_ranks(_with_a_faster_optimizer, 2, str(tmp_path))
    )
    assert (tmp_path / "seed 2" / "llama").exists()


@pytest.mark.parametrize("cell", ["wrong: 1.2 (loss)", "traceback: KeyError: 'x'"])
def test_a_wrong_cell_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    script: dict[str, Any] = runpy.run_path(str(TABLE))
    results = {
        "llama": {
            "one process/causal": cell,
            "tp 2/causal": "0.001",
            "cp 2 gather/causal": "refused: by name",
        }
    }
    main = script["main"]
    monkeypatch.setitem(
        main.__globals__, "run_all", lambda types, columns, folder, kept: results
    )
    for arguments, code in ((["--check"], 1), ([], 0)):
        monkeypatch.setattr(
            sys, "argv", ["families.py", "--write", str(tmp_path / "page.md"), *arguments]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == code
    assert "| wrong | 1 | 0 |" in (tmp_path / "page.md").read_text() or cell.startswith(
        "traceback"
    )
