"""The digest by which ranks compare what they hold whole: no single change may go unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.checkpoint import copies
from threefold.checkpoint.copies import digest, refuse_drift, state_held
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool)


@given(st.integers(0, 70), st.integers(0, 10**6), st.sampled_from(TYPES))
@settings(max_examples=60, deadline=None)
def test_one_changed_value_is_another_digest(size: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, (size + 1,), generator=generator).to(dtype)
    other = tensor.clone()
    place = seed % (size + 1)
    other[place] = 1 - other[place].to(torch.int64)
    assert digest([tensor]) == digest([tensor.clone()])
    assert digest([tensor]) != digest([other])


def test_one_ulp_a_sign_of_zero_and_a_nan_are_seen() -> None:
    tensor = torch.linspace(-1, 1, 1001)
    for place, value in (
        (7, torch.nextafter(tensor[7], tensor[8])),
        (500, torch.tensor(-0.0)),
        (3, torch.tensor(torch.nan)),
    ):
        other = tensor.clone()
        other[place] = value
        assert digest([tensor]) != digest([other])


@pytest.mark.parametrize("block", [4, 1 << 14])
def test_places_count_across_blocks_pieces_and_tensors(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that changed places, in one tensor or between two, however the words are cut."""
    monkeypatch.setitem(copies._BLOCK, "cpu", block)
    monkeypatch.setattr(copies, "_PIECE_BYTES", 64)
    copies._weights.cache_clear()
    words = torch.arange(1, 100, dtype=torch.int64)
    for first, second in ((0, 1), (3, 4), (0, 98), (8, 72)):
        other = words.clone()
        other[[first, second]] = words[[second, first]]
        assert digest([words]) != digest([other])
    small = [torch.ones(3), torch.zeros(5), torch.full((2, 2), 2.0).t()]
    assert digest(small) != digest([small[1], small[0], small[2]])
    copies._weights.cache_clear()


def test_a_view_has_the_digest_of_its_copy() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    for view in (whole.t(), whole[1:, 1:], whole[0, 1:4], whole[:0]):
        assert digest([view]) == digest([view.contiguous().clone()])


def test_what_is_held_has_buffers_and_moments() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    held = state_held(module, optimizer)
    assert {
        "model.0.weight",
        "model.1.running_mean",
        "optimizer.exp_avg.0.weight",
        "optimizer.step.1.bias",
    } <= set(held)
    assert "model.1.running_mean" not in state_held(module, None, buffers=False)


def test_one_process_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(mesh: Mesh, values: object) -> None:
        raise AssertionError("nothing is sent")

    monkeypatch.setattr(Mesh, "gather", gather)
    held = {"model.a": torch.ones(2)}
    refuse_drift(held, Mesh(Topology(), 0, torch.device("cpu")), when="after step 1")


def test_what_differs_is_named_with_the_ranks_that_hold_the_same_part() -> None:
    # Four ranks; `split` lies over pairs of them, (0, 1) and (2, 3) hold the same halves.
    groups = {(): ["model.whole"], ((2, 2),): ["model.split"]}
    parts = [{"model.whole": 1, "model.split": rank // 2} for rank in range(4)]
    parts[3] = {"model.whole": 1, "model.split": 7}
    assert (
        copies._difference(parts, groups, "now")
        == "the copies of split differ now: rank 3 from rank 2"
    )
    parts[1] = {"model.whole": 2, "model.split": 0}
    text = "the copies of whole differ now: rank 1 from rank 0, and so does 1 more tensor"
    assert copies._difference(parts, groups, "now") == text
    parts[2] = {**parts[2], "optimizer.step.bias": 4}
    text = "ranks 0 and 2 do not hold the same tensors now: optimizer.step.bias is on only one of them"
    assert copies._difference(parts, groups, "now") == text
