"""A share of the documents is held out: chosen by the seed, never in a row of the training, the same after a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.rows.concat import IGNORED, PADDING, Rows
from threefold.data.rows.known_rows import parts_of
from threefold.data.rows.packing import Packing
from threefold.data.store.held_out import StoreSide, held_out_documents
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.data.store.writer import StoreWriter
from threefold.data.text.source import LossMask
from threefold.errors import DataError

Documents = list[tuple[list[int], list[bool]]]


def store_of(folder: Path, documents: Documents, *, pairs: bool = False) -> TokenStore:
    mask = LossMask(
        "preference" if pairs else "chat", ("messages",), "completion" if pairs else "assistant"
    )
    with StoreWriter(folder / "x", dtype=np.dtype("<u2")) as writer:
        for ids, trained_on in documents:
            writer.add_block(
                np.array(ids, "<u2"),
                np.array([len(ids)], np.int32),
                np.array(trained_on, np.bool_),
            )
        counts = (
            "",
            writer.num_tokens,
            writer.num_documents,
            0,
            "",
            "",
            "",
            "",
            60_001,
            60_000,
        )
        of = {
            "loss_mask": mask,
            "num_loss_tokens": writer.num_loss_tokens,
            "pairs": True if pairs else None,
        }
        writer.finish(lambda w: StoreInfo(w.content_hash(), *counts, **of))
    return TokenStore(folder / "x")


@st.composite
def some_documents(draw: st.DrawFn) -> Documents:
    """Documents whose tokens are all different, and which of them are trained on."""
    found, at = [], 0
    for length in draw(st.lists(st.integers(2, 9), min_size=3, max_size=30)):
        found.append(
            (
                list(range(at, at + length)),
                draw(st.lists(st.booleans(), min_size=length, max_size=length)),
            )
        )
        at += length
    found[0][1][1:] = [True] * (len(found[0][1]) - 1)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held-out")


@given(
    documents=some_documents(),
    share=st.floats(0.01, 0.6),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_side_reads_as_a_store_of_its_documents_alone(
    folder: Path, documents: Documents, share: float, seed: int, data: st.DataObject
) -> None:
    whole = store_of(folder, documents)
    sides = [StoreSide(whole, share, seed, held_out) for held_out in (False, True)]
    numbers = [side.document_numbers.tolist() for side in sides]
    assert sorted(numbers[0] + numbers[1]) == list(range(len(documents)))
    assert len(numbers[1]) == max(1, round(share * len(documents)))
    for side, own in zip(sides, numbers, strict=True):
        ids = [id for number in own for id in documents[number][0]]
        mask = [trained_on for number in own for trained_on in documents[number][1]]
        assert (
            side.document_ends.tolist()
            == np.cumsum([len(documents[number][0]) for number in own]).tolist()
        )
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
        for each in (side, pickle.loads(pickle.dumps(side))):
            assert each.read(start, stop).tolist() == ids[start:stop]
            assert each.trained_on(start, stop).tolist() == mask[start:stop]
            starts = np.array([start, 0, stop])
            stops = np.array([stop, len(ids), stop])
            assert each.count_trained_on(starts, stops).tolist() == [
                sum(mask[start:stop]),
                sum(mask),
                0,
            ]
        places = [place for run in side.places(start, stop) for place in range(*run)]
        assert places == ids[start:stop]  # ids are places in the whole
        first, last = side.inside(
            place := data.draw(st.integers(0, whole.num_tokens)), whole.num_tokens
        )
        assert ids[first:last] == [id for id in ids if id >= place]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_no_row_of_the_training_has_a_token_of_a_document_that_is_held_out(
    folder: Path, packing: str
) -> None:
    documents: Documents = [
        (list(range(at, at + 7)), [False, False, *[True] * 5]) for at in range(0, 700, 7)
    ]
    whole = store_of(folder, documents)

    def tokens_of(rows: Rows) -> set[int]:
        read = rows.rows(np.arange(rows.num_rows))
        inputs = read["input_ids"][read["document_ids"] != PADDING]
        return {*inputs.tolist(), *read["labels"][read["labels"] != IGNORED].tolist()}

    of = {"document_mask": True, "eval_share": 0.1, "seed": 3}
    training = Packing(12, packing, **of).pack(whole)
    held_out = Packing(12, packing, held_out=True, **of).pack(whole)
    one, other = tokens_of(training), tokens_of(held_out)
    assert one and other and not one & other
    documents_held_out = {id // 7 for id in other}
    assert documents_held_out <= set(
        np.flatnonzero(held_out_documents(whole, share=0.1, seed=3)).tolist()
    )
    (part,) = parts_of(training)
    side = cast("StoreSide", part.rows.store)
    assert not side.has_held_out()
    side._begins = side._begins - 1
    assert side.has_held_out()


def test_the_choice_depends_on_the_seed_and_hardly_on_the_length(folder: Path) -> None:
    def chosen(number: int, seed: int) -> set[int]:
        whole = store_of(folder, [([0, 1], [True, True])] * number)
        return set(np.flatnonzero(held_out_documents(whole, share=0.1, seed=seed)).tolist())

    assert chosen(500, 0) == chosen(500, 0) != chosen(500, 1)
    assert len(chosen(500, 0) - chosen(550, 0)) <= 10


def test_both_documents_of_a_pair_are_on_one_side(folder: Path) -> None:
    pairs: Documents = [([1, 2, number], [False, True, True]) for number in range(40)]
    held_out = held_out_documents(store_of(folder, pairs, pairs=True), share=0.2, seed=0)
    assert held_out.sum() == 8 and np.array_equal(held_out[::2], held_out[1::2])


def test_a_share_that_leaves_no_document_is_refused(folder: Path) -> None:
    whole = store_of(folder, [([0, 1, 2], [True] * 3)])
    with pytest.raises(DataError, match="holds out 1 of 1 documents: ") as refused:
        Packing(4, "best_fit", eval_share=0.01).pack(whole)
    # A smaller share of one document holds it out all the same.
    assert refused.value.problems[0].fix.startswith("leave data.eval_share out, or a source")
