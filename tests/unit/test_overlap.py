"""What of an evaluation is trained on, against a reading of every span, and told once for equal bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_held_out import Documents, store_of

from threefold.data.store import overlap as module
from threefold.data.store.held_out import StoreSide
from threefold.data.store.overlap import SPAN, overlap


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
    flat = [id for ids in trained for id in ids]
    spans = {tuple(flat[at : at + SPAN]) for at in range(len(flat) - SPAN + 1)}
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
    stores = [
        store_of(tmp_path / name, each) for name, each in (("t", training), ("e", evaluation))
    ]
    monkeypatch.setattr(module, "_BATCH", batch)
    found = overlap({"source": stores[0]}, stores[1])
    exact, alike = by_reading(training, evaluation)
    assert exact and alike and found.num_documents == 30 and found.share_read == 1
    assert {match.document for match in found.exact} == exact and len(found.exact) == len(exact)
    for match in found.exact:
        assert (
            training[match.trained_document][0] == evaluation[match.document][0]
            and match.source == "source"
        )
    assert {match.document: match.num_tokens for match in found.alike} == alike and len(
        found.alike
    ) == len(alike)
    for match in found.alike:
        ids = training[match.trained_document][0]
        mine = evaluation[match.document][0]
        there = {tuple(ids[at : at + SPAN]) for at in range(len(ids) - SPAN + 1)}
        assert there & {tuple(mine[at : at + SPAN]) for at in range(len(mine) - SPAN + 1)}


def test_other_stores_have_nothing_in_common(tmp_path: Path) -> None:
    one: Documents = [(list(range(100)), [True] * 100)]
    other: Documents = [(list(range(1, 64)) + list(range(200, 300)), [True] * 163)]
    found = overlap({"source": store_of(tmp_path / "a", one)}, store_of(tmp_path / "b", other))
    assert not found.exact and not found.alike
    assert list(found.lines()) == [
        "none of 1 held-out documents, nor 64 consecutive tokens of one, is trained on"
    ]


def test_all_findings_are_a_line_each(tmp_path: Path) -> None:
    draws = random.Random(3)
    documents: Documents = [
        ([draws.randrange(60_000) for _ in range(70)], [True] * 70) for _ in range(3)
    ]
    store = store_of(tmp_path / "a", documents)
    assert [*overlap({"source": store}, store).lines()] == [
        "3 of 3 held-out documents trained on, token for token:\n  document 0 (document 0 of source)\n"
        "  document 1 (document 1 of source)\n  document 2 (document 2 of source)"
    ]


def test_what_is_not_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(1)
    store = store_of(
        tmp_path / "a",
        [([draws.randrange(60_000) for _ in range(70)], [True] * 70) for _ in range(50)],
    )
    monkeypatch.setattr(module, "_BATCH", 200)
    monkeypatch.setattr(module, "_MOST_SPANS", 1000)
    found = overlap({"source": store}, store, most=500)
    assert found.share_read < 0.2 and found.step == 4 and 0 < len(found.exact) < 10
    line = next(found.lines(2))
    assert "; ...   (in 1" in line and line.endswith(
        " of the training, 1 in 4 spans; threefold data overlap reads all)"
    )


def test_what_is_held_out_is_named_by_its_number_in_the_source(tmp_path: Path) -> None:
    draws = random.Random(2)
    documents = documents_of(draws, 60)
    documents += documents[:1] * 20
    store = store_of(tmp_path / "a", documents)
    sides = [StoreSide(store, 0.3, 1, held_out) for held_out in (False, True)]
    found = overlap({"source": sides[0]}, sides[1])
    same = {0, *range(60, 80)}
    held_out = same & set(sides[1].document_numbers.tolist())
    assert held_out and {match.document for match in found.exact} == held_out
    assert {match.trained_document for match in found.exact} <= same - held_out
