"""Random numbers of a run belong to rows: the same on any number of data ranks, in any order, however often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.training.batches import micro_batches, with_noise

ROWS = 8


def drawn(
    dp: int,
    size: int,
    *,
    spread: bool,
    step: int = 1,
    seed: int = 0,
    cp: int = 1,
    sequence: object = None,
) -> dict[tuple[int, int], Any]:
    """Numbers [16] that rows of a global batch get, by row and cp rank, where each rank draws for its micro-batches."""
    found = {}
    topology = Topology(dp, 1, cp, 1)
    for rank in range(topology.world_size):
        mesh = Mesh(topology, rank, torch.device("cpu"))
        model: Any = SimpleNamespace(mesh=mesh, tensor=SimpleNamespace(sequence_group=sequence))
        own = {"rows": torch.arange(ROWS)[mesh.dp_rank :: dp]}
        torch.manual_seed(rank)  # what was drawn before does not count
        pieces = with_noise(
            micro_batches(own, size, spread=spread), model, seed=seed, step=step, spread=spread
        )
        assert len(pieces) == ROWS // dp // size
        for _ in range(2):  # a step may be computed again
            for piece in pieces:
                for row, noise in zip(
                    piece["rows"].tolist(), torch.rand(size, 16).tolist(), strict=True
                ):
                    assert found.setdefault((row, mesh.cp_rank), noise) == noise
    return found


@pytest.mark.parametrize(("size", "spread"), [(1, False), (1, True), (2, True)])
def test_noise_of_a_row_is_the_same_on_any_number_of_data_ranks(
    size: int, spread: bool
) -> None:
    alone = drawn(1, size, spread=spread)
    assert all(drawn(dp, size, spread=spread) == alone for dp in (2, 4))
    assert len({repr(noise) for noise in alone.values()}) == ROWS, (
        "each row has noise of its own"
    )


def test_other_steps_seeds_and_parts_of_a_row_have_other_noise() -> None:
    same = {"spread": True, "cp": 2}
    found = [drawn(2, 2, **same), drawn(2, 2, **same, step=2), drawn(2, 2, **same, seed=1)]  # type: ignore[arg-type]
    assert len({repr(noise) for each in found for noise in each.values()}) == 3 * ROWS * 2
