"""The published rows that the planner's rates come from, and those that judge them."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from threefold.plan.accelerators import ACCELERATORS
from threefold.plan.efficiency import margin_of


@pytest.fixture(scope="module")
def speeds() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "speeds.py"
    spec = importlib.util.spec_from_file_location("speeds", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speeds"] = module
    spec.loader.exec_module(module)
    return module


def test_a_row_is_in_the_half_that_its_source_and_model_say(speeds: Any) -> None:
    _, rows = speeds.read()
    assert [row["half"] for row in rows] == speeds.halves(rows)
    assert len(rows) >= 80 and sum("a3b" in row["model"] for row in rows) >= 8
    assert min(Counter(row["half"] for row in rows).values()) >= 40
    # Rows of one source and model never stand in both halves of a stratum.
    groups: dict[Any, set[str]] = {}
    for row in rows:
        key = speeds.stratum(row), row["source"].split(", 2")[0], row["model"]
        groups.setdefault(key, set()).add(row["half"])
    assert all(len(each) == 1 for each in groups.values())


def test_a_row_can_be_looked_up(speeds: Any) -> None:
    models, rows = speeds.read()
    for row in rows:
        mesh = row["mesh"]
        assert (
            mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"] == row["gpus"]
        ), row
        assert (
            row["model"] in models
            and row["source"].split("/")[0].endswith((".com", ".org"))
            and row["date"]
        )


def test_the_rates_are_those_that_fit(speeds: Any) -> None:
    """No rate can be moved by a quarter of what it is known to beforehand and fit the rows to fit better."""
    _, rows = speeds.read()
    rows = [row for row in rows if row["half"] == "fit"]
    rates = dict(speeds.PROGRAMS)
    for family, own in speeds.EFFICIENCIES.items():
        rates |= {f"{family}.products": own.products, f"{family}.attention": own.attention}
        rates |= {"experts": own.experts, "shown": own.shown, **own.float8}
    least = speeds.loss(rates, rows)
    for name, (_, sigma) in speeds.PRIORS.items():
        for way in (-0.25, 0.25):
            assert (
                speeds.loss({**rates, name: rates[name] + way * sigma}, rows) > 0.999 * least
            ), (name, way)


def test_the_half_that_judges(speeds: Any) -> None:
    """Of rows that nothing was fitted to: the median, and how many are inside of their margin."""
    _, rows = speeds.read()
    judged = [row for row in rows if row["half"] == "judge"]
    errors = [speeds.error(row) for row in judged]
    assert all(math.isfinite(each) for each in errors)
    assert statistics.median(map(abs, errors)) <= 0.08
    factors = [speeds.margin(row).figure for row in judged]
    inside = [
        1 / factor <= 1 + off <= factor for factor, off in zip(factors, errors, strict=True)
    ]
    assert sum(inside) >= 0.75 * len(inside)


def test_margins_are_those_of_the_rows_to_fit(speeds: Any) -> None:
    _, rows = speeds.read()
    fitted = [row for row in rows if row["half"] == "fit"]
    found = speeds.margins(fitted)
    h100, l4 = ACCELERATORS["h100-80gb"], ACCELERATORS["l4"]
    dense, mixture, other = (
        margin_of(h100, mixture=False),
        margin_of(h100, mixture=True),
        margin_of(l4, mixture=False),
    )
    assert dense.figure == pytest.approx(found["dense"], abs=0.01)
    assert mixture.figure == pytest.approx(found["mixture"], abs=0.01)
    assert dense.difference == pytest.approx(found["a difference"], abs=0.01)
    assert other.figure / dense.figure == pytest.approx(
        found["a device without rows"], abs=0.01
    )
    counts = Counter(
        speeds.family_of(ACCELERATORS[row["device"]])
        for row in fitted
        if speeds.stratum(row)[1] == "dense"
    )
    assert {family: own.rows for family, own in speeds.EFFICIENCIES.items()} == counts
    few = margin_of(ACCELERATORS["mi300x"], mixture=False)
    assert dense.figure < few.figure < other.figure and dense.difference < few.difference
    assert (
        "none was published for such a device" in other.source
        and "only 2 for such a device" in few.source
    )


def test_a_published_figure_that_is_wrong_is_seen(speeds: Any) -> None:
    """Of a row that is published ten times as fast, or with no number, the error is no small one."""
    _, rows = speeds.read()
    row = rows[0]
    assert (
        abs(speeds.error(row)) < 0.2 < abs(speeds.error({**row, "tokens_per_s_per_gpu": 57620}))
    )
    assert not speeds.error({**row, "tokens_per_s_per_gpu": math.nan}) < 0.2


def test_the_tables_of_the_page(speeds: Any) -> None:
    """docs/plan.md has what `python benchmarks/speeds.py --page` writes."""
    _, rows = speeds.read()
    text = speeds.PAGE.read_text(encoding="utf-8")
    assert speeds.with_page(text, speeds.page_of(rows)) == text
