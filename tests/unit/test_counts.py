"""What a step of one process in bfloat16 launches and moves stays as small as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from threefold.mesh.mesh import init_mesh

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize(("moments", "at_most"), [("float32", 32.5), ("bfloat16", 24.5)])
def test_a_working_copy_moves_a_third_of_what_fsdp_moves(moments: str, at_most: float) -> None:
    from counts import GOALS, counts  # not at the head: it imports the compiler

    mesh = init_mesh(1, device="cpu")
    try:
        by_fsdp, own = (
            counts(mesh, width=256, moments=moments, micro_batches=1, by_fsdp=which)
            for which in (True, False)
        )
    finally:
        mesh.close()
    # Norm 2, gradient 2, weight 8, moments 16 or 8, copy 2; the rest is activations of narrow layers.
    assert own[1] <= at_most < GOALS["bytes"] < 70 < by_fsdp[1]
    # The layers' own: nothing is launched for a layer's weights.
    assert own[0] <= 109 < by_fsdp[0]
