"""Rows of pairs against a brute-force reading: each pair once an epoch, whole, in one row, its answers learnt once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.order.order import Order
from threefold.data.rows.best_fit import PLACEMENTS, PaddedRows, best_fit_among
from threefold.data.rows.concat import IGNORED, PADDING
from threefold.data.rows.known_rows import why_cut
from threefold.data.rows.packing import Packing
from threefold.data.sampling.loader import TokenLoader
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.data.store.writer import StoreWriter
from threefold.data.text.source import LossMask
from threefold.errors import ConfigError, DataError

PAIRS = LossMask("preference", ("chosen", "rejected", "prompt"), "completion")
PACKINGS = st.sampled_from(["best_fit", "none"])
SETTINGS: dict[str, Any] = {"document_mask": True}


@dataclass(frozen=True)
class Side:
    """A document: its ids, and whether each is learnt."""

    ids: list[int]
    learnt: list[bool]


Pair = tuple[Side, Side]


@st.composite
def pairs(draw: st.DrawFn, longest: int = 9) -> list[Pair]:
    """Pairs whose ids are all different, but for the prompt, which both sides of a pair have."""
    found, at = [], 0
    for _ in range(draw(st.integers(1, 12))):
        prompt = list(range(at, at := at + draw(st.integers(1, longest))))
        sides = []
        for _ in range(2):
            bits = draw(st.lists(st.booleans(), min_size=1, max_size=longest))
            answer = list(range(at, at := at + len(bits)))
            sides.append(Side(prompt + answer, [False] * len(prompt) + [True, *bits[1:]]))
        found.append((sides[0], sides[1]))
    return found


def store_of(
    folder: Path,
    sides: Sequence[Side],
    *,
    loss_mask: LossMask = PAIRS,
    of_pairs: bool | None = True,
) -> TokenStore:
    with StoreWriter(folder / "x", dtype=np.dtype("<u2")) as writer:
        for side in sides:
            writer.add_block(
                np.array(side.ids), np.array([len(side.ids)], np.int32), np.array(side.learnt)
            )
        writer.finish(
            lambda w: StoreInfo(
                *(
                    w.content_hash(),
                    "",
                    w.num_tokens,
                    w.num_documents,
                    0,
                    "",
                    "",
                    "",
                    "",
                    60_001,
                    60_000,
                ),
                loss_mask=loss_mask,
                num_loss_tokens=w.num_loss_tokens,
                pairs=of_pairs,
            )
        )
    return TokenStore(folder / "x")


def flat(found: Sequence[Pair]) -> list[Side]:
    return [side for pair in found for side in pair]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


def size_of(pair: Pair) -> int:
    return len(pair[0].ids) + len(pair[1].ids)


def as_read(side: Side, kept: int) -> tuple[list[int], list[int]]:
    """(inputs, labels) of a document of which `kept` tokens are inputs: each place predicts the next token."""
    after = [*zip(side.ids, side.learnt, strict=True)][1 : kept + 1]
    labels = [id if learnt else IGNORED for id, learnt in after]
    return side.ids[:kept], labels + [IGNORED] * (kept - len(labels))


def pairs_in(
    batch: dict[str, np.ndarray], row: int, seq_len: int
) -> list[tuple[list[int], list[int]]]:
    """(inputs, labels) of each document in a row, by a loop over its places."""
    found: list[tuple[list[int], list[int]]] = []
    ended = False
    for place in range(seq_len):
        document = int(batch["document_ids"][row, place])
        if document == PADDING:
            ended = True
            assert batch["labels"][row, place] == IGNORED
            continue
        assert not ended and document in (len(found) - 1, len(found))
        if document == len(found):
            found.append(([], []))
        ids, labels = found[-1]
        assert batch["position_ids"][row, place] == len(ids)
        ids.append(int(batch["input_ids"][row, place]))
        labels.append(int(batch["labels"][row, place]))
    return found


def rows_by_hand(sizes: Sequence[int], seq_len: int, lookahead: int) -> int:
    """How many rows best-fit decreasing takes, by trying every row for every pair."""
    count = 0
    for begin in range(0, len(sizes), lookahead):
        rooms: list[int] = []
        for size in sorted(sizes[begin : begin + lookahead], reverse=True):
            fitting = [room for room in rooms if room >= size]
            if fitting:
                rooms.remove(min(fitting))
            rooms.append((min(fitting) if fitting else seq_len) - size)
        count += len(rooms)
    return count


@settings(max_examples=40, deadline=None)
@given(found=pairs(), more=st.integers(0, 30), packing=PACKINGS, lookahead=st.integers(1, 14))
def test_each_pair_is_in_one_row_once_and_learnt_once(
    folder: Path, found: list[Pair], more: int, packing: str, lookahead: int
) -> None:
    seq_len = max(size_of(pair) for pair in found) + more
    placement = best_fit_among(lookahead) if packing == "best_fit" else PLACEMENTS["none"]
    rows = PaddedRows(
        store_of(folder, flat(found)), seq_len=seq_len, placement=placement, **SETTINGS
    )
    batch = rows.rows(np.arange(rows.num_rows))
    expected = {
        pair[0].ids[0]: [as_read(side, len(side.ids)) for side in pair] for pair in found
    }
    read: list[int] = []
    for row in range(rows.num_rows):
        documents = pairs_in(batch, row, seq_len)
        assert documents and len(documents) % 2 == 0
        for even in range(0, len(documents), 2):
            first = documents[even][0][0]
            assert documents[even : even + 2] == expected[first]
            read.append(first)
        assert packing == "best_fit" or len(documents) == 2
    assert sorted(read) == sorted(expected)
    targets = batch["labels"][batch["labels"] != IGNORED].tolist()
    assert sorted(targets) == sorted(
        id
        for side in flat(found)
        for id, learnt in zip(side.ids, side.learnt, strict=True)
        if learnt
    )
    sizes = [size_of(pair) for pair in found]
    assert rows.num_rows == (
        rows_by_hand(sizes, seq_len, lookahead) if packing == "best_fit" else len(found)
    )
    report = rows.report
    assert (report.num_pairs, report.dropped_tokens, report.dropped_pairs) == (len(found), 0, 0)
    assert f"in {len(found):,} pair" in str(report)
    assert pickle.loads(pickle.dumps(rows)).fingerprint == rows.fingerprint


@settings(max_examples=40, deadline=None)
@given(found=pairs(), seq_len=st.integers(2, 40), packing=PACKINGS)
def test_truncated_pair_keeps_both_beginnings_or_is_dropped(
    folder: Path, found: list[Pair], seq_len: int, packing: str
) -> None:
    """Each document of a pair that does not fit keeps its first half row, and the label after it."""
    expected, dropped, lost, truncated = {}, 0, 0, 0
    for pair in found:
        half = seq_len // 2 if size_of(pair) > seq_len else seq_len
        read = [as_read(side, min(len(side.ids), half)) for side in pair]
        if any(set(labels) <= {IGNORED} for _, labels in read):
            dropped, lost = dropped + 1, lost + size_of(pair)
            continue
        expected[pair[0].ids[0]] = read
        beyond = [max(0, len(side.ids) - half - 1) for side in pair]
        lost, truncated = lost + sum(beyond), truncated + np.count_nonzero(beyond)
    store = store_of(folder, flat(found))
    packing_of = Packing(seq_len, packing, truncate=True, **SETTINGS)
    if not expected:
        with pytest.raises(
            DataError, match=r"tokens, which data\.truncate keeps, do not reach both answers"
        ) as caught:
            packing_of.pack(store)
        assert "truncate true" not in caught.value.problems[0].fix
        return
    rows = packing_of.pack(store)
    batch = rows.rows(np.arange(rows.num_rows))
    read = {}
    for row in range(rows.num_rows):
        documents = pairs_in(batch, row, seq_len)
        for even in range(0, len(documents), 2):
            assert documents[even][0][0] not in read
            read[documents[even][0][0]] = documents[even : even + 2]
    assert read == expected
    report = rows.report
    assert (report.dropped_pairs, report.dropped_tokens, report.truncated_documents) == (
        dropped,
        lost,
        truncated,
    )
    assert not dropped or f"{dropped} pair" in str(report)
    # What the audit and the hashes of blocks ask: where the tokens of a row lie, and who reads a token.
    for row in range(rows.num_rows):
        for start, stop in rows.stretches(row):
            assert all(row in rows.readers(token, token + 1) for token in range(start, stop))


def test_pair_that_does_not_fit_is_refused_with_a_fix_that_works(folder: Path) -> None:
    short, long = (
        Side([1, 2, 3], [False, True, True]),
        Side([*range(1, 9)], [False] * 4 + [True] * 4),
    )
    other = Side([*range(1, 5), *range(11, 15)], long.learnt)
    store = store_of(folder, [short, short, short, long, long, other])
    with pytest.raises(DataError) as caught:
        Packing(10, None, **SETTINGS).pack(store)
    (problem,) = caught.value.problems
    assert problem.what == (
        "data.seq_len = 10: 2 of 3 pairs do not fit in a row; the first, in row 1, has 11 tokens: 3 with the chosen "
        "answer and 8 with the rejected one"
    )
    assert (
        problem.fix.startswith("--data.seq_len 16   ") and "--data.truncate true" in problem.fix
    )
    assert Packing(16, None, **SETTINGS).pack(store).num_rows == 3
    rows = Packing(10, None, truncate=True, **SETTINGS).pack(store)
    assert rows.report.dropped_tokens == 3 * 2 and rows.report.truncated_documents == 3
    assert "3 documents truncated, 6 tokens dropped" in str(rows.report)


def test_pair_that_differs_only_after_the_cut_is_dropped(folder: Path) -> None:
    begun = [1, 2, 3, 4, 5]
    sides = [Side([*begun, end], [False, True, True, True, True, True]) for end in (6, 7)]
    other = [Side([8, 9], [False, True]), Side([8, 10], [False, True])]
    rows = Packing(8, None, truncate=True, **SETTINGS).pack(store_of(folder, [*sides, *other]))
    assert (rows.num_rows, rows.report.dropped_pairs, rows.report.dropped_tokens) == (1, 1, 12)
    assert "1 pair dropped (no two answers before the cut)" in str(rows.report)
    # With one token more of each they differ: it is the label of the last place.
    rows = Packing(10, None, truncate=True, **SETTINGS).pack(store_of(folder, [*sides, *other]))
    assert rows.report.dropped_pairs == 0 and {6, 7} <= set(
        rows.rows(np.arange(rows.num_rows))["labels"].ravel().tolist()
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"packing": "concat", **SETTINGS}, "data.packing = concat with pairs of answers"),
        ({"packing": None, "document_mask": False}, "data.document_mask = false with pairs"),
    ],
)
def test_settings_that_pairs_cannot_have(
    folder: Path, options: dict[str, Any], what: str
) -> None:
    side = Side([1, 2, 3], [False, True, True])
    with pytest.raises(ConfigError) as caught:
        Packing(8, **options).pack(store_of(folder, [side, side]))
    (problem,) = caught.value.problems
    assert problem.what.startswith(what) and "leave data." in problem.fix


def test_store_with_a_document_of_one_token_is_refused(folder: Path) -> None:
    store = store_of(folder, [Side([1, 2], [False, True]), Side([1], [True])])
    with pytest.raises(
        DataError, match=r"the pair in row 0 has a document of less than 2 tokens"
    ):
        Packing(8, None, **SETTINGS).pack(store)


def test_rows_of_pairs_are_not_those_of_its_documents(folder: Path) -> None:
    sides = [Side([7, index, 9], [False, True, True]) for index in range(6)]
    fingerprints = set()
    for loss_mask, of_pairs in (
        (PAIRS, True),
        (LossMask("chat", ("messages",), "assistant"), None),
    ):
        for packing in ("best_fit", "none"):
            store = store_of(folder, sides, loss_mask=loss_mask, of_pairs=of_pairs)
            fingerprints.add(Packing(8, packing, **SETTINGS).pack(store).fingerprint)
    assert len(fingerprints) == 4


@settings(max_examples=25, deadline=None)
@given(
    found=pairs(),
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=3),
    steps=st.integers(0, 4),
)
def test_order_of_pairs_goes_on_exactly_on_other_dp_sizes(
    folder: Path, found: list[Pair], sizes: list[int], steps: int
) -> None:
    """In the middle of an epoch, and over its end: the same pairs at each step as in one process without a stop."""
    seq_len = max(size_of(pair) for pair in found) + 5
    rows = Packing(seq_len, None, **SETTINGS).pack(store_of(folder, flat(found)))
    order = Order(rows.num_rows, 4, seed=3, shuffle=True, tail="carry")

    def read(
        dp_size: int, count: int, state: dict[str, Any] | None
    ) -> tuple[list[Any], dict[str, Any]]:
        ranks = []
        for rank in range(dp_size):
            loader = TokenLoader(rows, order, dp_rank=rank, dp_size=dp_size, document_mask=True)
            if state is not None:
                loader.load_state_dict(state)
            ranks.append((list(islice(iter(loader), count)), loader.state_dict()))
        steps = []
        for number in range(count):
            parts = [batches[number] for batches, _ in ranks]
            place = np.concatenate([part["indices"].numpy() for part in parts])
            kept = np.argsort(place, kind="stable")
            names = ("indices", "input_ids", "labels", "document_ids", "position_ids")
            steps.append(
                [
                    np.concatenate([part[name].numpy() for part in parts])[kept].tolist()
                    for name in names
                ]
            )
        return steps, ranks[0][1]

    whole, _ = read(1, steps * len(sizes), None)
    resumed: list[Any] = []
    state = None
    for dp_size in sizes:
        more, state = read(dp_size, steps, state)
        resumed += more
    assert resumed == whole


def test_lengths_of_rows_of_one_pair_are_those_of_both_documents(folder: Path) -> None:
    found = [Side([1, 2, 3], [False, True, True]), Side([1, 2], [False, True])]
    found += [Side([4, 5], [False, True]), Side([4, 6, 7, 8], [False, True, True, True])]
    rows = Packing(9, "none", **SETTINGS).pack(store_of(folder, found))
    assert isinstance(rows, PaddedRows)
    assert rows.lengths(np.array([1, 0, 1])).tolist() == [6, 5, 6]
    assert rows.document_ends.tolist() == [2, 4]


def test_why_answers_of_pairs_are_cut_off(folder: Path) -> None:
    """One pair fits, one is cut after its answers have begun, and one before."""
    sides = []
    for at, prompt, answer in ((1000, 1, 2), (2000, 1, 6), (3000, 9, 1)):
        for first in (at + 100, at + 200):
            ids = [*range(at, at + prompt), *range(first, first + answer)]
            sides.append(Side(ids, [False] * prompt + [True] * answer))
    rows = Packing(8, "none", truncate=True, **SETTINGS).pack(store_of(folder, sides))
    why = {reason: each.tolist() for reason, each in why_cut(rows).items()}
    assert why == {
        "truncation": [0, 0, 2, 2, 0, 0],
        "pair dropped": [0, 0, 0, 0, 1, 1],
        "first token": [0] * 6,
    }
    assert rows.spans_of_documents()[0].tolist() == [1, 1, 1, 1, 0, 0]
