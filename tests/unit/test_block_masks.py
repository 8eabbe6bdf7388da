"""Masks by blocks show what the model's mask functions and the documents' numbers say of each pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_mask
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from threefold.data.rows.concat import PADDING
from threefold.model.context_parallel import flex
from threefold.model.context_parallel.flex import block_mask, hides_later_keys
from threefold.model.context_parallel.positions import local_positions, starts_of_documents

ROWS, LENGTH = 3, 48
NO_PADDING = torch.zeros(ROWS, dtype=torch.long)
CAUSAL: dict[str, Any] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(5),
    "chunks": chunked_causal_mask_function(7, NO_PADDING),
    "windows of a window": and_masks(
        sliding_window_overlay(3), sliding_window_causal_mask_function(9)
    ),
}
OTHERS: dict[str, Any] = {
    "both sides": bidirectional_mask_function,
    "windows on both sides": sliding_window_bidirectional_mask_function(4),
    "causal or near": or_masks(
        causal_mask_function, sliding_window_bidirectional_mask_function(2)
    ),
    "a model's own": lambda row, head, query, key: key <= query + 1,
}


def _documents(seed: int, *, padded: bool) -> Tensor:
    """Documents of random lengths, whose numbers do not count from 0; the end of each row is padding."""
    generator = torch.Generator().manual_seed(seed)
    documents = 5 + (torch.rand(ROWS, LENGTH, generator=generator) < 0.15).cumsum(1)
    if padded:
        used = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
        documents[torch.arange(LENGTH) >= used] = PADDING
    return documents


def _by_pairs(
    function: Callable[..., Any], documents: Tensor | None, queries: Tensor
) -> Tensor:
    """The mask [rows, queries, keys] by the documents' numbers, and by places in each document alone."""
    seen = []
    for row in range(ROWS):
        ids = torch.zeros(LENGTH, dtype=torch.long) if documents is None else documents[row]
        # Each number is one document here.
        begins = torch.tensor([ids.tolist().index(number) for number in ids])
        places, zero = torch.arange(LENGTH) - begins, torch.tensor(0)
        shown = function(torch.tensor(row), zero, places[queries][:, None], places[None])
        seen.append(shown & (ids[queries][:, None] == ids[None]))
    return torch.stack(seen)


def _by_blocks(
    function: Callable[..., Any], documents: Tensor | None, queries: Tensor
) -> Tensor:
    blocks = block_mask(
        function, queries=queries, num_keys=LENGTH, documents=documents, batch=ROWS
    )
    dense = create_mask(blocks.mask_mod, ROWS, 1, len(queries), LENGTH, device="cpu")[:, 0]
    # What is computed is what the blocks hold, and in those that are partly hidden the mask.
    held = blocks.to_dense().bool().expand(ROWS, -1, -1, -1)[:, 0]
    size = blocks.BLOCK_SIZE
    wide = held.repeat_interleave(size[0], 1).repeat_interleave(size[1], 2)[
        :, : len(queries), :LENGTH
    ]
    assert not bool((dense & ~wide).any()), "a block that is left out holds a pair that is seen"
    return dense


def _parts() -> dict[str, Tensor]:
    halves = {
        f"cp {rank} of {size}": local_positions(LENGTH, cp_size=size, cp_rank=rank)
        for size, rank in ((2, 0), (2, 1), (4, 2))
    }
    return {"whole rows": torch.arange(LENGTH), **halves}


@pytest.mark.parametrize("part", _parts())
@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_blocks_are_what_each_pair_says(name: str, part: str) -> None:
    function, queries = (CAUSAL | OTHERS)[name], _parts()[part]
    assert torch.equal(_by_blocks(function, None, queries), _by_pairs(function, None, queries))
    for seed in range(3):
        documents = _documents(seed, padded=seed > 0)
        assert torch.equal(
            _by_blocks(function, documents, queries), _by_pairs(function, documents, queries)
        ), seed


def test_causal_functions_are_known_by_what_they_are_made_of() -> None:
    assert {
        name: hides_later_keys(function) for name, function in CAUSAL.items()
    } == dict.fromkeys(CAUSAL, True)
    assert {
        name: hides_later_keys(function) for name, function in OTHERS.items()
    } == dict.fromkeys(OTHERS, False)


@pytest.mark.parametrize(
    "fault", ["starts one late", "causal though it is not", "starts by local queries"]
)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, queries, name = (
        _documents(1, padded=True),
        local_positions(LENGTH, cp_size=2, cp_rank=1),
        "chunks",
    )
    if fault == "starts one late":
        monkeypatch.setattr(
            flex, "starts_of_documents", lambda ids: starts_of_documents(ids) + 1
        )
    elif fault == "causal though it is not":
        monkeypatch.setattr(flex, "hides_later_keys", lambda function: True)
        name = "both sides"
    else:
        shifted = starts_of_documents(documents).index_select(1, torch.arange(LENGTH).roll(1))
        monkeypatch.setattr(flex, "starts_of_documents", lambda ids: shifted)
    function = (CAUSAL | OTHERS)[name]
    assert not torch.equal(
        _by_blocks(function, documents, queries), _by_pairs(function, documents, queries)
    )


def test_a_mask_reads_one_number_of_a_query_and_none_of_a_key() -> None:
    """Whole rows: where the query's document starts. Of a cp rank besides its true place in the row."""
    for queries, reads in (
        (torch.arange(LENGTH), 1),
        (local_positions(LENGTH, cp_size=2, cp_rank=0), 2),
    ):
        blocks = block_mask(
            causal_mask_function,
            queries=queries,
            num_keys=LENGTH,
            documents=_documents(0, padded=False),
            batch=ROWS,
        )
        traced = make_fx(blocks.mask_mod)(*[torch.tensor([1])] * 4)
        assert (
            sum(node.target is torch.ops.aten.index.Tensor for node in traced.graph.nodes)
            == reads
        ), traced.code
