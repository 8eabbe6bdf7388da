"""Rows: every token where the contract says, labels shifted, positions and documents counted, in any order."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.rows.best_fit import PaddedRows, best_fit, best_fit_among
from threefold.data.rows.concat import IGNORED, PADDING, ConcatRows, Rows
from threefold.data.rows.known_rows import reasons_text, why_cut
from threefold.data.rows.packing import Packing
from threefold.data.rows.pieces import cut_documents
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.data.store.writer import StoreWriter
from threefold.data.text.source import LossMask
from threefold.errors import ConfigError, DataError

END = 60_000

# Lengths with the end token: 1 is an empty document.
lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def pack(store: TokenStore, *, lookahead: int | None = None, **settings: Any) -> Any:
    if lookahead is not None:
        settings.pop("packing")
        return PaddedRows(store, placement=best_fit_among(lookahead), **settings)
    return Packing(**settings).pack(store)


def store_of(folder: Path, lengths: list[int]) -> TokenStore:
    """Documents of these lengths whose tokens are all different but the end token: 0, 1, 2, ... END."""
    with StoreWriter(folder / "x", dtype=np.dtype("<u2")) as writer:
        at = 0
        for length in lengths:
            writer.add_block(
                np.append(np.arange(at, at + length - 1), END), np.array([length], np.int32)
            )
            at += length - 1
        writer.finish(
            lambda w: StoreInfo(
                w.content_hash(),
                "",
                w.num_tokens,
                w.num_documents,
                0,
                "",
                "",
                "",
                "",
                END + 1,
                END,
            )
        )
    return TokenStore(folder / "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packing")


def all_rows(rows: Rows) -> dict[str, np.ndarray]:
    return rows.rows(np.arange(rows.num_rows))


def documents_of(lengths: list[int]) -> list[list[int]]:
    at, documents = 0, []
    for length in lengths:
        documents.append([*range(at, at + length - 1), END])
        at += length - 1
    return documents


def check_documents(batch: dict[str, np.ndarray], *, document_mask: bool) -> None:
    """Positions and document ids against a reading of each row token by token; documents end after END."""
    for row in range(len(batch["input_ids"])):
        document = position = 0
        for place in range(batch["input_ids"].shape[1]):
            if batch["document_ids"][row, place] == PADDING:
                assert (batch["document_ids"][row, place:] == PADDING).all()
                assert (batch["labels"][row, place:] == IGNORED).all()
                break
            expected = (document, position) if document_mask else (0, place)
            assert (
                batch["document_ids"][row, place],
                batch["position_ids"][row, place],
            ) == expected
            position += 1
            if batch["input_ids"][row, place] == END:
                document, position = document + 1, 0


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 24), document_mask=st.booleans())
def test_concat_is_the_stream_in_windows(
    folder: Path, lengths: list[int], seq_len: int, document_mask: bool
) -> None:
    store = store_of(folder, lengths)
    stream = [token for document in documents_of(lengths) for token in document]
    num_rows = (len(stream) - 1) // seq_len
    if num_rows == 0:
        return
    rows = ConcatRows(store, seq_len=seq_len, document_mask=document_mask)
    assert rows.num_rows == num_rows
    assert rows.report.dropped_tokens == len(stream) - 1 - num_rows * seq_len
    batch = all_rows(rows)
    assert batch["input_ids"].ravel().tolist() == stream[: num_rows * seq_len]
    pairs = pairwise(stream[: num_rows * seq_len + 1])
    expected = [IGNORED if token == END and document_mask else label for token, label in pairs]
    assert batch["labels"].ravel().tolist() == expected
    check_documents(batch, document_mask=document_mask)


@given(
    lengths=lengths_of_documents,
    seq_len=st.integers(1, 24),
    document_mask=st.booleans(),
    truncate=st.booleans(),
)
def test_none_gives_each_document_rows_of_its_own(
    folder: Path, lengths: list[int], seq_len: int, document_mask: bool, truncate: bool
) -> None:
    if max(lengths) < 2:
        return
    rows = pack(
        store_of(folder, lengths),
        seq_len=seq_len,
        packing="none",
        document_mask=document_mask,
        truncate=truncate,
    )
    batch = all_rows(rows)
    check_documents(batch, document_mask=document_mask)
    expected = []
    for document in documents_of(lengths):
        windows = [
            document[at : at + seq_len + 1] for at in range(0, len(document) - 1, seq_len)
        ]
        expected.extend(windows[:1] if truncate else windows)
    assert rows.num_rows == len(expected)
    for row, window in enumerate(expected):
        used = int((batch["document_ids"][row] != PADDING).sum())
        assert batch["input_ids"][row, :used].tolist() == window[:seq_len]
        targets = batch["labels"][row][batch["labels"][row] != IGNORED]
        assert targets.tolist() == window[1:]
        assert (batch["input_ids"][row, used:] == END).all()
    longer = sum(length > seq_len + 1 for length in lengths)
    report = rows.report
    assert (report.split_documents, report.truncated_documents) == (
        (0, longer) if truncate else (longer, 0)
    )
    lost = sum(max(0, length - seq_len - 1) for length in lengths) if truncate else 0
    assert report.dropped_tokens == lengths.count(1) + lost
    places = batch["document_ids"]
    assert report.padding_share == pytest.approx((places == PADDING).mean())


@given(
    lengths=lengths_of_documents,
    seq_len=st.integers(1, 24),
    document_mask=st.booleans(),
    lookahead=st.integers(1, 40),
)
def test_best_fit_holds_every_token_once_and_cuts_only_longer_documents(
    folder: Path, lengths: list[int], seq_len: int, document_mask: bool, lookahead: int
) -> None:
    if max(lengths) < 2:
        return
    rows = pack(
        store_of(folder, lengths),
        seq_len=seq_len,
        packing="best_fit",
        document_mask=document_mask,
        lookahead=lookahead,
    )
    batch = all_rows(rows)
    check_documents(batch, document_mask=document_mask)
    real = batch["document_ids"] != PADDING
    inputs = batch["input_ids"][real]
    words = [token for document in documents_of(lengths) for token in document if token != END]
    assert sorted(inputs[inputs != END].tolist()) == words
    next_token = {a: b for document in documents_of(lengths) for a, b in pairwise(document)}
    firsts = {document[0] for document in documents_of(lengths)}
    for row in range(rows.num_rows):
        tokens = batch["input_ids"][row][real[row]].tolist()
        labels = batch["labels"][row][real[row]].tolist()
        for place, token in enumerate(tokens[1:]):
            # Documents that are kept apart have no label across their border; nor has the rest of one that was cut.
            crosses = tokens[place] == END and (document_mask or token not in firsts)
            assert labels[place] == (IGNORED if crosses else token)
        # Where the row ends inside a document, its last label is that document's next token.
        assert labels[-1] == (IGNORED if tokens[-1] == END else next_token[tokens[-1]])
        assert tokens[-1] == END or len(tokens) == seq_len
    whole = {
        tuple(document) for document in documents_of(lengths) if 2 <= len(document) <= seq_len
    }
    flat = [tuple(batch["input_ids"][row][real[row]].tolist()) for row in range(rows.num_rows)]
    assert all(any(_within(document, row) for row in flat) for document in whole)
    assert rows.report.padding_share == pytest.approx(1 - real.mean())
    assert rows.report.split_documents == sum(length > seq_len + 1 for length in lengths)


def _within(document: tuple[int, ...], row: tuple[int, ...]) -> bool:
    return any(
        row[at : at + len(document)] == document for at in range(len(row) - len(document) + 1)
    )


@given(lengths=st.lists(st.integers(1, 16), max_size=60), lookahead=st.integers(1, 70))
def test_best_fit_plan_is_a_partition_that_fits(lengths: list[int], lookahead: int) -> None:
    order, row_ends = best_fit(np.array(lengths, np.int64), capacity=16, lookahead=lookahead)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [part.tolist() for part in np.split(order, row_ends[:-1])] if lengths else []
    for row in rows:
        assert row == sorted(row) and row
        assert sum(lengths[i] for i in row) <= 16
        # Near neighbours only: a row never reaches beyond one look-ahead.
        assert row[0] // lookahead == row[-1] // lookahead
    assert [row[0] for row in rows if row[0] < lookahead] == sorted(
        row[0] for row in rows if row[0] < lookahead
    )


def test_best_fit_takes_the_tightest_row() -> None:
    # Longest first: 9 and 7 open rows with 1 and 3 left; 3 fits the second exactly, 1 the first.
    order, row_ends = best_fit(np.array([3, 9, 1, 7], np.int64), capacity=10, lookahead=4)
    assert [part.tolist() for part in np.split(order, row_ends[:-1])] == [[0, 3], [1, 2]]


def test_best_fit_pads_little_on_real_lengths(folder: Path) -> None:
    """Against one document a row, on 2,000 documents of skewed lengths; a larger look-ahead pads less."""
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 2000).astype(int), 2, 256)
    shares = {}
    for lookahead in (16, 2048):
        order, row_ends = best_fit(lengths, capacity=256, lookahead=lookahead)
        assert len(order) == 2000
        shares[lookahead] = 1 - lengths.sum() / (len(row_ends) * 256)
    assert shares[2048] < 0.005 < shares[16] < 0.2 < 1 - lengths.mean() / 256


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_any_rows_in_any_order(folder: Path, packing: str, document_mask: bool) -> None:
    rows = pack(
        store_of(folder, [9, 1, 30, 4, 17, 2]),
        seq_len=8,
        packing=packing,
        document_mask=document_mask,
    )
    everything = all_rows(rows)
    indices = np.array([3, 0, 3, rows.num_rows - 1], np.int32)
    for name, values in rows.rows(indices).items():
        assert values.dtype == np.int64 and values.flags.c_contiguous and values.flags.writeable
        assert np.array_equal(values, everything[name][indices])
    assert {
        name: values.shape for name, values in rows.rows(indices[:0]).items()
    } == dict.fromkeys(everything, (0, 8))
    for wrong in (-1, rows.num_rows):
        with pytest.raises(IndexError):
            rows.rows(np.array([wrong]))


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_rows_pickle_as_their_recipe(folder: Path, packing: str) -> None:
    rows = pack(
        store_of(folder, [9, 1, 30, 4] * 200), seq_len=8, packing=packing, document_mask=True
    )
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again.fingerprint == rows.fingerprint and again.report == rows.report
    assert np.array_equal(all_rows(again)["input_ids"], all_rows(rows)["input_ids"])


def test_fingerprint_follows_every_setting(folder: Path) -> None:
    store = store_of(folder, [9, 1, 30, 4])
    settings = [
        {"seq_len": 8},
        {"seq_len": 9},
        {"seq_len": 8, "document_mask": True},
        {"seq_len": 8, "packing": "best_fit"},
        {"seq_len": 8, "packing": "best_fit", "lookahead": 2},
        {"seq_len": 8, "packing": "best_fit", "truncate": True},
        {"seq_len": 8, "packing": "none"},
        {"seq_len": 8, "packing": "none", "truncate": True},
    ]
    prints = [pack(store, **setting).fingerprint for setting in settings]
    assert len(set(prints)) == len(prints)
    assert prints == [pack(store, **setting).fingerprint for setting in settings]  # type: ignore[arg-type]
    other = pack(store_of(folder, [9, 1, 30, 5]), seq_len=8)
    assert other.fingerprint != prints[0]


def test_padding_begins_a_document_of_its_own(folder: Path) -> None:
    batch = pack(store_of(folder, [3]), seq_len=6, packing="none", document_mask=True).rows(
        np.array([0])
    )
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, PADDING, PADDING, PADDING]]
    assert batch["labels"].tolist() == [[1, END, IGNORED, IGNORED, IGNORED, IGNORED]]


def test_document_of_a_row_and_its_end_token_needs_no_second_row() -> None:
    pieces = cut_documents(np.array([9, 18 + 1]), seq_len=8, truncate=False)
    assert pieces.starts.tolist() == [0, 9, 17]
    assert pieces.lengths.tolist() == [8, 8, 2]
    assert pieces.cut.tolist() == [True, True, False]
    assert (pieces.dropped_tokens, pieces.split_documents) == (0, 1)


def test_report_in_words(folder: Path) -> None:
    store = store_of(folder, [9, 1, 30, 4])
    assert (
        str(pack(store, seq_len=8).report)
        == "5 rows of 44 tokens in 4 documents, 3 tokens dropped"
    )
    assert (
        str(pack(store, seq_len=8, packing="none").report)
        == "6 rows of 44 tokens in 4 documents, 12.50% padding, 1 document split, 1 token dropped"
    )


def test_padded_rows_of_a_store_without_end_token_are_filled_with_zero(folder: Path) -> None:
    store_of(folder, [3, 2])
    (folder / "x.json").unlink()
    batch = PaddedRows(TokenStore(folder / "x"), seq_len=4).rows(np.array([1]))
    assert batch["input_ids"].tolist() == [[2, END, 0, 0]]


# --- what is learnt ------------------------------------------------------------------------------------------------


def labelled_store(
    folder: Path, documents: list[list[int]], targets: list[list[bool]]
) -> TokenStore:
    with StoreWriter(folder / "y", dtype=np.dtype("<u2")) as writer:
        for ids, learnt in zip(documents, targets, strict=True):
            writer.add_block(
                np.array(ids), np.array([len(ids)], np.int32), np.array(learnt, np.bool_)
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
                    END + 1,
                    END,
                ),
                loss_mask=LossMask("chat", ("messages",), "assistant"),
                num_loss_tokens=w.num_loss_tokens,
            )
        )
    return TokenStore(folder / "y")


def learnt_tokens(batch: dict[str, np.ndarray]) -> list[int]:
    labels = batch["labels"]
    return sorted(labels[labels != IGNORED].tolist())


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@settings(max_examples=40)
@given(
    documents=st.lists(
        st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=20
    ),
    seq_len=st.integers(1, 24),
    document_mask=st.booleans(),
)
def test_token_is_learnt_once_if_its_bit_says_so(
    folder: Path, packing: str, documents: list[list[bool]], seq_len: int, document_mask: bool
) -> None:
    """Against the bits, read document by document; every token has an id of its own."""
    at, ids = 0, []
    for learnt in documents:
        ids.append(list(range(at, at + len(learnt))))
        at += len(learnt)
    store = labelled_store(folder, ids, documents)
    assert store.trained_on(0, store.num_tokens).tolist() == [
        bit for learnt in documents for bit in learnt
    ]
    try:
        rows = pack(store, seq_len=seq_len, packing=packing, document_mask=document_mask)
    except (DataError, ConfigError):
        return
    batch = all_rows(rows)
    found = learnt_tokens(batch)
    assert len(set(found)) == len(found)
    assert rows.num_targets.tolist() == (batch["labels"] != IGNORED).sum(axis=1).tolist()
    assert rows.targets_of_documents().tolist() == [
        len({*found} & {*document}) for document in ids
    ]
    inputs = np.where(batch["document_ids"] == PADDING, -1, batch["input_ids"])
    in_rows = [int(np.isin(inputs, document).any(axis=1).sum()) for document in ids]
    assert rows.spans_of_documents()[0].tolist() == in_rows
    why = why_cut(rows)
    assert all((each >= 0).all() for each in why.values())
    assert sum(int(each.sum()) for each in why.values()) == sum(map(sum, documents)) - len(
        found
    )
    firsts = {document[0] for document in ids}
    bits = set(np.flatnonzero([bit for learnt in documents for bit in learnt]).tolist())
    assert set(found) <= bits
    missing = bits - set(found)
    if packing == "concat":
        # The tail that fills no row.
        missing -= set(range(rows.num_rows * seq_len + 1, store.num_tokens))
        assert missing <= (firsts if document_mask else {0})
    else:
        # A document's first token follows nothing of it.
        assert missing <= firsts
    if document_mask:
        assert not firsts & set(found)


@settings(max_examples=40)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 24))
def test_number_of_targets_does_not_depend_on_the_packing(
    folder: Path, lengths: list[int], seq_len: int
) -> None:
    documents = [
        list(range(sum(lengths[:k]), sum(lengths[: k + 1]))) for k in range(len(lengths))
    ]
    store = labelled_store(folder, documents, [[True] * len(each) for each in documents])
    counts = set()
    for packing in ("best_fit", "none"):
        try:
            rows = pack(store, seq_len=seq_len, packing=packing, document_mask=True)
        except DataError:
            continue
        counts.add(len(learnt_tokens(all_rows(rows))))
    assert counts <= {sum(length - 1 for length in lengths)}


@pytest.mark.parametrize(
    ("packing", "truncate"), [("best_fit", True), ("none", True), ("concat", False)]
)
def test_rows_in_which_nothing_is_trained_on_are_refused(
    folder: Path, packing: str, truncate: bool
) -> None:
    """What is trained on lies beyond the cut; one token in one row of them all is enough."""
    prompts = [*[False] * 9, True]
    documents = [list(range(10)), list(range(10, 20))]
    settings: dict[str, Any] = {
        "seq_len": 8 if packing != "concat" else 18,
        "packing": packing,
        "truncate": truncate,
    }
    with pytest.raises(ConfigError) as raised:
        pack(labelled_store(folder, documents, [[False] * 10, prompts]), **settings)
    (problem,) = raised.value.problems
    assert problem.what.startswith("data.source has no token that is trained on in any of its ")
    assert (
        f"data.seq_len = {settings['seq_len']}, data.truncate = {str(truncate).lower()}"
        in problem.what
    )
    assert problem.fix.startswith("--data.seq_len 10 ")
    assert (", or --data.truncate false" in problem.fix) is truncate
    kept = pack(
        labelled_store(folder, documents, [[False] * 10, [False] * 5 + [True] * 5]), **settings
    )
    assert kept.num_targets.sum() == 4
    assert (kept.num_targets == 0).any() or packing != "none"


@settings(max_examples=40)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=200), data=st.data())
def test_counts_of_a_loss_mask_are_those_of_its_bits(
    folder: Path, bits: list[bool], data: st.DataObject
) -> None:
    store = labelled_store(folder, [list(range(len(bits)))], [bits])
    places = st.integers(0, len(bits))
    stretches = [
        sorted(pair) for pair in data.draw(st.lists(st.tuples(places, places), max_size=20))
    ]
    starts, stops = np.array(stretches, np.int64).reshape(-1, 2).T
    assert store.count_trained_on(starts, stops).tolist() == [
        sum(bits[start:stop]) for start, stop in stretches
    ]


def test_cut_loss_mask_are_named(folder: Path) -> None:
    labelled_store(folder, [[1, 2, 3] * 9], [[True] * 27])
    (folder / "y.loss_mask").write_bytes(b"abc")
    with pytest.raises(
        DataError, match=r"y\.loss_mask is missing, or is not the loss mask of 27 tokens"
    ):
        TokenStore(folder / "y")


@pytest.mark.parametrize(
    ("settings", "spans", "why"),
    [
        ({"packing": "concat"}, [3, 2, 1], "tail 1, first token 1"),
        ({"packing": "none"}, [3, 1, 1], "first token 3"),
        ({"packing": "none", "truncate": True}, [1, 1, 1], "truncation 5, first token 3"),
    ],
    ids=["concat", "split", "truncated"],
)
def test_why_tokens_of_a_document_are_not_learnt(
    folder: Path, settings: dict[str, Any], spans: list[int], why: str
) -> None:
    lengths = [10, 4, 4]
    store = labelled_store(
        folder, documents_of(lengths), [[True] * length for length in lengths]
    )
    rows = pack(store, seq_len=4, document_mask=False, **settings)
    assert rows.spans_of_documents()[0].tolist() == spans
    assert (
        reasons_text({reason: int(each.sum()) for reason, each in why_cut(rows).items()}) == why
    )
