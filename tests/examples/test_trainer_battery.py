"""Both Trainers through the battery on one and two ranks: ours is always the one process with whole batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from examples.trainer_battery import CASES, SHORT, run, same
from ranks.huggingface_cases import on_ranks
from threefold.integrations.huggingface import Trainer

pytestmark = pytest.mark.examples
PAGE = Path(__file__).parents[2] / "docs/huggingface.md"
RANKS = (1, 2)


def ours(folder: str, world: int, names: list[str]) -> dict[str, Any]:
    return run(Trainer, folder, world, False, names)


def both(folder: str, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [*CASES]
    return run(transformers.Trainer, f"{folder}/theirs", world, False, names), ours(
        f"{folder}/ours", world, names
    )


def test_one_case_of_each_mechanism_is_exact_on_two_ranks(tmp_path: Path) -> None:
    wanted = run(transformers.Trainer, str(tmp_path / "whole"), 1, True, SHORT)
    assert {name: found["error"] for name, found in wanted.items() if "error" in found} == {}
    for mine in on_ranks(ours, 2, str(tmp_path / "2"), 2, SHORT):
        for name in SHORT:
            assert same(mine[name], wanted[name]), (name, mine[name], wanted[name])


def test_page_has_a_row_of_every_case() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines()]
    for name in CASES:
        (row,) = (row for row in rows if row[0] == f"| {name}")
        assert row[2] == row[4].removesuffix(" |") == "same", row


@pytest.mark.long
@pytest.mark.timeout(600)
def test_battery_is_exact_and_the_page_has_its_table(tmp_path: Path) -> None:
    wanted = run(transformers.Trainer, str(tmp_path / "whole"), 1, True, [*CASES])
    assert {name: found["error"] for name, found in wanted.items() if "error" in found} == {}
    verdicts: dict[str, list[str]] = {name: [] for name in CASES}
    for world in RANKS:
        of_ranks = on_ranks(both, world, str(tmp_path / str(world)), world)
        theirs, _ = of_ranks[0]
        for name in CASES:
            for _, mine in of_ranks:
                assert same(mine[name], wanted[name]), (name, world, mine[name], wanted[name])
            word = "raises" if "error" in theirs[name] else "differs"
            verdicts[name] += ["same" if same(theirs[name], wanted[name]) else word, "same"]
    table = "".join(f"| {name} | {' | '.join(verdicts[name])} |\n" for name in CASES)
    assert table in PAGE.read_text(), table
