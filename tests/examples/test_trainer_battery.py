"""Both Trainers through the battery on one and two ranks: ours is always the one process with whole batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from examples.trainer_battery import CASES, run, same
from ranks.huggingface_cases import on_ranks
from threefold.integrations.huggingface import Trainer

pytestmark = pytest.mark.examples
PAGE = Path(__file__).parents[2] / "docs/huggingface.md"
RANKS = (1, 2)


def both(folder: str, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return run(transformers.Trainer, f"{folder}/theirs", world, False), run(Trainer, f"{folder}/ours", world, False)


@pytest.mark.timeout(600)
def test_battery_is_exact_and_the_page_has_its_table(tmp_path: Path) -> None:
    wanted = run(transformers.Trainer, str(tmp_path / "whole"), 1, True)
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
