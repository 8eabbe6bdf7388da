"""What of an evaluation is trained on, against a reading of every span, and told once for equal bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_held_out import Documents, store_of

from threefold.data.rows.packing import Packing
from threefold.data.store import overlap as module
from threefold.data.store.hash_cache import known
from threefold.data.store.overlap import SPAN, Overlap, overlap
from threefold.data.store.store import TokenStore
from threefold.run.overlap import overlaps_at_start


def documents_of(draws: random.Random, number: int, *others: Documents) -> Documents:
    """Documents of few ids, some of them copies, or with stretches, of the `others`."""
    made: Documents = []
    for _ in range(number):
        ids = [draws.randrange(9) for _ in range(draws.randint(2, 200))]
        if others and draws.random() < 0.5:
            copied = draws.choice(draws.choice(others))[0]
            first = draws.randrange(len(copied))
            at = draws.randrange(len(ids))
            ids[at:at] = copied[first : first + draws.choice((SPAN - 1, SPAN, SPAN + 1, 150))]
        if others and draws.random() < 0.2:
            ids = list(draws.choice(draws.choice(others))[0])
        made.append((ids, [draws.random() < 0.04 for _ in ids]))
    return made


def by_reading(training: Documents, evaluation: Documents) -> tuple[set[int], dict[int, int]]:
    """The documents that are equal to one of the training, and of the others how many tokens are in common spans."""
    trained = [ids for ids, _ in training]
    spans = {tuple(ids[at : at + SPAN]) for ids in trained for at in range(len(ids) - SPAN + 1)}
    exact = {number for number, (ids, _) in enumerate(evaluation) if ids in trained}
    alike = {}
    for number, (ids, mask) in enumerate(evaluation):
        covered = {
            place
            for at in range(len(ids) - SPAN + 1)
            if tuple(ids[at : at + SPAN]) in spans and any(mask[at : at + SPAN])
            for place in range(at, at + SPAN)
        }
        if covered and number not in exact:
            alike[number] = len(covered)
    return exact, alike


@pytest.mark.parametrize("batch", [module._BATCH, 130], ids=["one batch", "many batches"])
@pytest.mark.parametrize("seed", range(6))
def test_overlap_is_what_a_reading_of_every_span_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, batch: int
) -> None:
    draws = random.Random(seed)
    training = documents_of(draws, 40)
    evaluation = documents_of(draws, 30, training)
    stores = [store_of(tmp_path / name, each) for name, each in (("t", training), ("e", evaluation))]
    monkeypatch.setattr(module, "_BATCH", batch)
    found = overlap({"source": stores[0]}, stores[1])
    exact, alike = by_reading(training, evaluation)
    assert exact and alike and found.num_documents == 30 and found.share_read == 1
    assert {match.document for match in found.exact} == exact and found.num_exact == len(exact)
    for match in found.exact:
        assert training[match.trained_document][0] == evaluation[match.document][0] and match.source == "source"
    assert {match.document: match.num_tokens for match in found.alike} == alike and found.num_alike == len(alike)
    for match in found.alike:
        ids = training[match.trained_document][0]
        mine = evaluation[match.document][0]
        there = {tuple(ids[at : at + SPAN]) for at in range(len(ids) - SPAN + 1)}
        assert there & {tuple(mine[at : at + SPAN]) for at in range(len(mine) - SPAN + 1)}


def test_other_stores_have_nothing_in_common(tmp_path: Path) -> None:
    one: Documents = [(list(range(100)), [True] * 100)]
    other: Documents = [(list(range(1, 64)) + list(range(200, 300)), [True] * 163)]
    found = overlap({"source": store_of(tmp_path / "a", one)}, store_of(tmp_path / "b", other))
    assert (found.num_exact, found.num_alike) == (0, 0)
    assert list(found.lines()) == ["none of 1 held-out documents, nor 64 tokens in a row of one, is trained on"]


def test_what_is_not_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(1)
    store = store_of(tmp_path / "a", [([draws.randrange(60_000) for _ in range(70)], [True] * 70) for _ in range(50)])
    monkeypatch.setattr(module, "_BATCH", 200)
    monkeypatch.setattr(module, "MOST_SPANS", 1000)
    found = overlap({"source": store}, store, most=500, named=2)
    assert found.share_read < 0.2 and found.step == 4 and 0 < found.num_exact < 10 and len(found.exact) == 2
    (line, *_) = found.lines()
    assert "; ... (in " in line and "by 1 in 4 of its spans: threefold data overlap reads all)" in line


def test_equal_bytes_are_read_once_and_pairs_by_their_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(2)
    documents = documents_of(draws, 60)
    documents.append(documents[0])
    store = TokenStore(store_of(tmp_path / "a", documents).prefix)
    store.blocks = known(store, cache=tmp_path / "cache").blocks
    sides = [
        Packing(32, "best_fit", eval_share=0.3, seed=1, held_out=held_out).pack(store) for held_out in (False, True)
    ]
    (first,) = overlaps_at_start(*sides, cache=tmp_path / "cache")
    monkeypatch.setattr("threefold.run.overlap.overlap", lambda *_, **__: pytest.fail("it is read again"))
    (again,) = overlaps_at_start(*sides, cache=tmp_path / "cache")
    assert again == first and isinstance(again, Overlap) and again.num_documents == 18
    assert {each.document for each in first.exact} <= {0, len(documents) - 1}
