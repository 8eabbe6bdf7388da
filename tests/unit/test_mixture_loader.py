"""A mixture in training: exact proportions in every window, the same on every mesh, through every stop."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks.spawn import PRELOAD
from threefold.config import loading
from threefold.config.loading import validate
from threefold.config.yaml_text import as_yaml, dump
from threefold.data.order.mixture import Mixture
from threefold.data.order.order import Order
from threefold.data.rows.concat import PackingReport
from threefold.data.rows.packing import MixedRows
from threefold.data.sampling.loader import TokenLoader
from threefold.data.tokens import ByteTokenizer
from threefold.errors import ConfigError, DataError
from threefold.mesh.mesh import init_mesh
from threefold.run import assemble

SEQ_LEN = 4
SIZES = {"code": 7, "prose": 30, "maths": 11}
WEIGHTS = {"code": 0.5, "prose": 0.3, "maths": 0.2}
DP_SIZES = st.sampled_from([1, 2, 3, 4, 6])


@dataclass(frozen=True)
class NamedRows:
    """Row i holds SEQ_LEN times the token base + i."""

    num_rows: int
    base: int
    seq_len: int = SEQ_LEN

    @property
    def fingerprint(self) -> str:
        return f"{self.num_rows} rows from {self.base}"

    @property
    def report(self) -> PackingReport:
        return PackingReport(
            self.num_rows, self.num_rows * self.seq_len + 1, 3, 1, padding_share=0.1 * self.base
        )

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        assert len(indices) and indices.min() >= 0 and indices.max() < self.num_rows
        tokens = np.repeat(indices.astype(np.int64)[:, None] + self.base, self.seq_len, axis=1)
        return {
            name: tokens.copy()
            for name in ("input_ids", "labels", "position_ids", "document_ids")
        }


def mixed(sizes: dict[str, int] = SIZES) -> MixedRows:
    """Row ids are the tokens: each source's base is the number of rows before it."""
    bases = np.cumsum([0, *sizes.values()])
    return MixedRows(
        {
            name: NamedRows(size, int(base))
            for (name, size), base in zip(sizes.items(), bases, strict=False)
        }
    )


def loader(
    dp_rank: int = 0,
    dp_size: int = 1,
    *,
    batch: int = 12,
    workers: int = 0,
    weights: Any = None,
    **order: Any,
) -> TokenLoader:
    rows = mixed()
    mixture = Mixture(rows.sizes, weights or WEIGHTS, seed=order.get("seed", 0))
    settled: dict[str, Any] = {"seed": 0, "shuffle": True, "tail": "drop", **order}
    one = Order(rows.num_rows, batch, mixture=mixture, **settled)
    return TokenLoader(rows, one, dp_rank=dp_rank, dp_size=dp_size, num_workers=workers)


def read(
    steps: int, dp_size: int = 1, state: Any = None, **settings: Any
) -> tuple[list[list[int]], Any]:
    """(row ids of each step in global order; the state afterwards, the same on all dp ranks)."""
    parts, states = [], []
    for rank in range(dp_size):
        one = loader(rank, dp_size, **settings)
        if state is not None:
            one.load_state_dict(state)
        batches = list(islice(one, steps))
        for batch in batches:
            assert batch["input_ids"][:, 0].tolist() == batch["indices"].tolist(), (
                "the row of that id"
            )
        parts.append([batch["indices"].tolist() for batch in batches])
        states.append(one.state_dict())
    assert all(found == states[0] for found in states)
    turns = [zip(*step, strict=True) for step in zip(*parts, strict=True)]
    return [list(chain.from_iterable(step)) for step in turns], states[0]


def source_of(row: int) -> str:
    return mixed().locate(row)[0]


# --- the rows of several sources ---------------------------------------------------------------------------------


@given(wanted=st.lists(st.integers(0, sum(SIZES.values()) - 1), min_size=1, max_size=20))
def test_rows_are_numbered_over_all_sources(wanted: list[int]) -> None:
    rows = mixed()
    batch = rows.rows(np.array(wanted))
    assert batch.keys() == {"input_ids", "labels", "position_ids", "document_ids"}
    assert batch["input_ids"].shape == (len(wanted), SEQ_LEN)
    assert batch["input_ids"][:, 0].tolist() == wanted
    for row in wanted:
        name, number = rows.locate(row)
        assert rows.parts[name].rows(np.array([number]))["labels"][0, 0] == row


def test_row_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"\[0, 48\)"):
        mixed().rows(np.array([48]))


def test_fingerprint_is_of_every_source_and_of_their_order() -> None:
    one = mixed().fingerprint
    assert one == mixed().fingerprint
    assert one != mixed({**SIZES, "maths": 12}).fingerprint
    assert one != mixed({"code": 7, "prose": 30, "sums": 11}).fingerprint
    assert mixed({"a": 3, "b": 3}).fingerprint != mixed({"b": 3, "a": 3}).fingerprint


def test_report_is_of_all_sources() -> None:
    report = mixed({"a": 2, "b": 6}).report
    assert (
        report.num_rows,
        report.num_tokens,
        report.num_documents,
        report.dropped_tokens,
    ) == (8, 34, 6, 2)
    assert report.padding_share == pytest.approx(0.1 * 2 * 6 / 8)


# --- the order ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    dp_size=DP_SIZES, seed=st.integers(0, 5), shuffle=st.booleans(), steps=st.integers(1, 12)
)
def test_order_is_the_same_on_every_mesh(
    dp_size: int, seed: int, shuffle: bool, steps: int
) -> None:
    assert read(steps, dp_size, seed=seed, shuffle=shuffle) == read(
        steps, seed=seed, shuffle=shuffle
    )


@settings(deadline=None, max_examples=30)
@given(
    dp_sizes=st.tuples(DP_SIZES, DP_SIZES),
    batches=st.tuples(st.sampled_from([12, 24]), st.sampled_from([12, 24])),
    stop=st.integers(0, 8),
)
def test_stop_anywhere_and_go_on_with_another_mesh_and_batch(
    dp_sizes: tuple[int, int], batches: tuple[int, int], stop: int
) -> None:
    first, state = read(stop, dp_sizes[0], batch=batches[0])
    assert json.loads(json.dumps(state)) == state
    second, _ = read(4, dp_sizes[1], state=state, batch=batches[1])
    rows = stop * batches[0] + 4 * batches[1]
    assert [*chain(*first), *chain(*second)] == list(chain(*read(rows // 12)[0]))


def test_proportion_is_exact_and_each_source_has_epochs_of_its_own() -> None:
    """Ten turns are a period: 5 of code, 3 of prose, 2 of maths. Nothing is dropped at an end: there is none."""
    steps, _ = read(70)
    rows = list(chain(*steps))
    for start in range(0, len(rows) - 10, 7):
        window = Counter(source_of(row) for row in rows[start : start + 10])
        assert window == {"code": 5, "prose": 3, "maths": 2}
    for name, size in SIZES.items():
        mine = [row for row in rows if source_of(row) == name]
        epochs = [mine[start : start + size] for start in range(0, len(mine) - size, size)]
        assert all(sorted(epoch) == sorted(set(mine)) for epoch in epochs)
        assert len(epochs) > 5 and epochs[0] != epochs[1]


@pytest.mark.parametrize(("workers", "stop"), [((2, 0), 3), ((0, 1), 2)])
def test_any_number_of_workers(workers: tuple[int, int], stop: int) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    first, state = read(stop, workers=workers[0])
    second, _ = read(2, state=state, workers=workers[1])
    assert first + second == read(stop + 2)[0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": {"code": 1, "prose": 1, "maths": 1}}, "mixture = "),
        ({"seed": 1}, "seed = 0, but here seed = 1"),
    ],
)
def test_state_of_another_mixture_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError) as caught:
        loader(**settings).load_state_dict(loader().state_dict())
    (problem,) = caught.value.problems
    assert named in problem.what


def test_state_says_what_the_mixture_was() -> None:
    assert loader().state_dict()["fingerprint"]["mixture"] == (
        "code (7 rows) x 5, prose (30 rows) x 3, maths (11 rows) x 2"
    )


# --- the config --------------------------------------------------------------------------------------------------

MIXTURE = "{code: {source: a, weight: 0.7}, prose: {source: 'hf:x', weight: 3, split: test}}"


def load(*overrides: tuple[str, str]) -> Any:
    return loading.load(None, overrides, environ={})


def test_mixture_in_the_config_reads_back(tmp_path: Path) -> None:
    loaded = load(("data.mixture", MIXTURE))
    mixture = loaded.config.data.mixture
    assert (mixture["code"].source, mixture["code"].weight) == ("a", 0.7)
    assert (mixture["prose"].split, mixture["code"].split) == ("test", None)
    assert (
        as_yaml(mixture)
        == "{code: {source: a, weight: 0.7}, prose: {source: hf:x, weight: 3.0, split: test}}"
    )
    path = tmp_path / "c.yaml"
    path.write_text(dump(loaded.config))
    assert loading.load(str(path), environ={}).config == loaded.config


FIX = "--data.mixture '{code: {source: FOLDER, weight: 0.7}, prose: {source: hf:ID, weight: 0.3}}'   (any names)"
SHAPE = "{name: {source: ..., weight: ...}, ...}"
ONE_SOURCE = "one of them: a mixture names all of its sources, each with a weight"


@pytest.mark.parametrize(
    ("given", "what", "expected", "fix"),
    [
        ("{}", "data.mixture names no source", "at least one", FIX),
        ("[a]", "data.mixture = [a] is not accepted (command line)", SHAPE, FIX),
        ("{a: 0.5}", "data.mixture.a = 0.5 is not accepted (command line)", SHAPE, FIX),
        (
            "{a: {source: x}}",
            "there is no data.mixture.a.weight (command line)",
            "a source and its weight under each name",
            FIX,
        ),
        (
            "{a: {source: x, weight: 0}}",
            "data.mixture.a.weight = 0 is not accepted (command line)",
            "a number greater than 0.0",
            FIX,
        ),
        (
            "{a: {source: x, weight: 1, spilt: y}}",
            "unknown key data.mixture.a.spilt (command line)",
            "one of source, weight, split, config_name, revision, fields",
            "did you mean split?",
        ),
    ],
)
def test_mixture_that_is_wrong(given: str, what: str, expected: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(("data.mixture", given))
    (problem,) = caught.value.problems
    assert (problem.what, problem.expected, problem.fix) == (what, expected, fix)


def test_mixture_contradicts_one_source_and_a_number_of_epochs() -> None:
    with pytest.raises(ConfigError) as caught:
        load(("data.mixture", MIXTURE), ("data.source", "corpus"), ("train.epochs", "2"))
    source, epochs = caught.value.problems
    assert source.what == "data.source = corpus and data.mixture are both set"
    assert source.expected == ONE_SOURCE
    assert (
        source.fix
        == "leave data.source out, or add it to the mixture: {source: corpus, weight: 1}"
    )
    assert epochs.what == "train.epochs = 2 with data.mixture"
    assert epochs.expected == (
        "train.steps: a mixture has no end, because each of its sources starts over when it is exhausted"
    )
    assert epochs.fix == "--train.steps N, and leave train.epochs out"


# --- in a run ----------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "capitals.txt").write_text("ABCDEFGH" * 40)
    (tmp_path / "small.txt").write_text("abcdefgh" * 100)
    return tmp_path


def of_files(corpus: Path, *, small: str = "small.txt") -> Any:
    return validate(
        {
            "data": {
                "mixture": {
                    "capitals": {"source": str(corpus / "capitals.txt"), "weight": 1},
                    "small": {"source": str(corpus / small), "weight": 3},
                },
                "seq_len": 16,
            },
            "train": {"global_batch": 8},
        }
    )


def test_run_reads_its_sources_in_proportion(corpus: Path) -> None:
    mesh = init_mesh(device="cpu")
    try:
        config = of_files(corpus)
        rows = assemble.rows_of(config, ByteTokenizer(), mesh)
        batches = assemble.loader_of(config, rows, mesh)
        for batch in islice(batches, 12):
            tokens = batch["input_ids"]
            assert int((tokens.max(1).values < ord("a")).sum()) == 2, (
                "a quarter of 8 rows is of capitals"
            )
    finally:
        mesh.close()


def test_source_that_cannot_be_read_is_named(corpus: Path) -> None:
    mesh = init_mesh(device="cpu")
    try:
        with pytest.raises(DataError, match=r"^data\.mixture\.small: data\.source = "):
            assemble.rows_of(of_files(corpus, small="nothing.txt"), ByteTokenizer(), mesh)
    finally:
        mesh.close()
