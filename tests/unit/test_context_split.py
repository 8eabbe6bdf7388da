"""The split of a sequence over cp ranks: every position once, and equal causal work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.errors import RunError
from threefold.mesh.mesh import init_mesh
from threefold.model.context_parallel.positions import (
    gathered_positions,
    local_positions,
    places_in_documents,
    text_lengths,
)
from threefold.run.load_model import load_model

CP = st.integers(1, 8)
UNITS = st.integers(1, 9)


def shares(sequence: int, cp_size: int) -> list[list[int]]:
    return [
        local_positions(sequence, cp_size=cp_size, cp_rank=rank).tolist()
        for rank in range(cp_size)
    ]


@settings(deadline=None)
@given(cp_size=CP, units=UNITS)
def test_every_position_is_on_one_rank(cp_size: int, units: int) -> None:
    sequence = 2 * cp_size * units
    found = shares(sequence, cp_size)
    assert sorted(position for share in found for position in share) == list(range(sequence))
    assert {len(share) for share in found} == {sequence // cp_size}


@settings(deadline=None)
@given(cp_size=CP, units=UNITS)
def test_causal_work_is_balanced(cp_size: int, units: int) -> None:
    """A query at position p meets p + 1 keys: the same number of pairs on every rank."""
    work = [
        sum(position + 1 for position in share)
        for share in shares(2 * cp_size * units, cp_size)
    ]
    assert len(set(work)) == 1


@settings(deadline=None)
@given(cp_size=CP, units=UNITS)
def test_positions_ascend_on_each_rank(cp_size: int, units: int) -> None:
    for share in shares(2 * cp_size * units, cp_size):
        assert share == sorted(share)


def test_two_ranks_by_hand() -> None:
    assert shares(8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shares(6, 3) == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("sequence", [1, 7, 8])
def test_one_rank_holds_the_row_as_it_is(sequence: int) -> None:
    """Of any length: nothing is split."""
    positions = local_positions(sequence, cp_size=1, cp_rank=0)
    assert positions.dtype == torch.int64
    assert positions.tolist() == list(range(sequence))


def test_positions_index_rows() -> None:
    rows = torch.arange(16).reshape(2, 8)
    taken = rows.index_select(1, local_positions(8, cp_size=2, cp_rank=1))
    assert taken.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]


def test_gathered_positions_are_those_of_the_ranks_in_order() -> None:
    assert gathered_positions(8, cp_size=2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_forward_outside_of_a_batch_is_refused() -> None:
    """Its masks would be those of another batch."""
    mesh = init_mesh(device="cpu")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = load_model(config={"model_type": "llama", "vocab_size": 32, **sizes}, mesh=mesh)
    tokens = torch.arange(16).reshape(2, 8)
    positions = torch.arange(8).expand(2, 8)
    with model.context.batch(
        {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    ) as local:
        inside = model.module.base_model(input_ids=local["input_ids"]).last_hidden_state
    assert inside.shape == (2, 8, 16)
    with pytest.raises(RunError) as caught:
        model.module.base_model(input_ids=tokens)
    mesh.close()
    assert str(caught.value) == (
        "the model was called outside of a batch\n"
        "  expected: the rows that its tokens belong to: they decide which tokens see one another\n"
        "  fix: with model.context.batch(rows) as local: model.forward(...), with the backward inside it too"
    )


def test_lengths_and_places_of_documents_with_any_numbers() -> None:
    documents = torch.tensor([[7, 7, 7, 1000, 1000, -1], [3, 4, 4, 4, 4, 4]])
    places = places_in_documents(documents)
    assert places.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert text_lengths(places, documents).tolist() == [[3, 3, 3, 2, 2, 1], [1, 5, 5, 5, 5, 5]]
    assert text_lengths(torch.arange(6).expand(2, -1), None).tolist() == [[6] * 6] * 2
