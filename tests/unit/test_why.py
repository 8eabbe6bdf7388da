"""What `threefold why` finds: what was planted, where it was, and nothing where nothing is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_audit import ONE, record

from threefold.audit.record import FILE
from threefold.audit.row_losses import FOLDER, RankPart, packed
from threefold.checkpoint.lineage import Journal
from threefold.data.order.mixture import Mixture
from threefold.errors import ConfigError, Problem, RunError, visible
from threefold.training.lag import Lag
from threefold.why import format
from threefold.why.batch_rows import StepBatches
from threefold.why.findings import Anomaly, findings
from threefold.why.lookback import Lookback

STEPS, ROWS = 120, 8
MIXTURE = Mixture({"prose": 40, "code": 90}, {"prose": 1, "code": 1}, seed=3)
Change = Callable[[np.ndarray[Any, Any], list[dict[str, Any]]], None]


def write(
    run: Path,
    change: Change = lambda losses, lines: None,
    *,
    seed: int = 0,
    mixture: Any = None,
) -> Path:
    """A run whose loss falls as one does, with the noise of rows; `change` may plant something in it."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, STEPS + 1)
    # [steps, rows]
    losses = (
        1.5
        + 4 * np.exp(-steps / 20)[:, None]
        + rng.normal(0, 0.1, (STEPS, ROWS))
        + rng.normal(0, 0.02, (STEPS, 1))
    )
    times = {"step_time_s": 0.5, "data_wait_s": 0.01}
    norms = np.exp(rng.normal(0, 0.15, STEPS))
    lines = [
        {"step": step, "loss": 0.0, "grad_norm": norm, **times}
        for step, norm in enumerate(norms.tolist(), 1)
    ]
    change(losses, lines)
    (run / FOLDER).mkdir(parents=True)
    counts = np.full(ROWS, 50)
    with (run / FOLDER / "rank-0000.bin").open("wb") as file:
        for step, row in enumerate(losses, start=1):
            file.write(
                packed(1, step, RankPart(0, 1, 0, 1), (row * counts).astype(np.float32), counts)
            )
    for line, row in zip(lines, losses, strict=True):
        line["loss"] = float(row.mean())
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = record((1, STEPS, ONE, ROWS), num_rows=130, mixture=mixture)
    (run / FILE).write_text("".join(json.dumps(line.to_record()) + "\n" for line in written))
    return run


def found(run: Path) -> list[Anomaly]:
    return findings(StepBatches(Lookback.of(run)))


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_found_where_nothing_is(tmp_path: Path, seed: int) -> None:
    run = write(tmp_path / "run", seed=seed, mixture=MIXTURE if seed % 2 else None)
    assert found(run) == []
    assert "nothing unusual" in "\n".join(format.run_lines(StepBatches(Lookback.of(run))))


@pytest.mark.parametrize("seed", range(8))
def test_a_row_that_makes_a_spike_is_named_first_with_its_share(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    step, place = int(rng.integers(20, STEPS)), int(rng.integers(ROWS))

    def plant(losses: Any, lines: Any) -> None:
        losses[step - 1, place] += 4

    run = write(tmp_path / "run", plant, seed=seed)
    (first,) = found(run)
    expected = StepBatches(Lookback.of(run)).rows_of(step)[place]
    assert first.steps == [step] and first.rows[0] == expected and expected.score > 20
    if step > 80:  # before, steps differ by as much from those before them
        assert first.kind == "spike"
        assert any(f"of the rise comes from row {expected.row}" in fact for fact in first.facts)
    assert first.rows[0].loss == pytest.approx(expected.like + 4, abs=0.5)


def test_a_row_far_below_its_like_is_named_without_a_spike(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        losses[79, 3] = 0.05

    (only,) = found(write(tmp_path / "run", plant))
    assert (only.kind, only.steps, only.rows[0].place) == ("row", [80], 3)
    assert "far below" in only.what


def test_a_rise_of_all_rows_is_no_row_s_and_comes_with_what_was_before(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        losses[60:64] += 1.5
        lines[59]["grad_norm"] = 40.0

    run = write(tmp_path / "run", plant)
    changed = {"optimizer.lr": [0.001, 0.01], "train.steps": [100, 120]}
    Journal(run).append("start", start=1, step=0)
    # A start that was ended before it had saved, and the one that took its place.
    for start in (2, 3):
        Journal(run).append("start", start=start, step=58, changed=changed)
    all_found = found(run)
    (spike,) = [each for each in all_found if each.kind == "spike" and 61 in each.steps]
    assert any("all rows rose" in fact for fact in spike.facts)
    assert "step 60 had a gradient norm of 40: the update after it was unusual" in spike.facts
    assert (
        "the run was resumed after step 58, with optimizer.lr 0.001 -> 0.01, train.steps 100 -> 120"
        in spike.facts
    )
    assert [each.steps for each in all_found if each.kind == "changed"] == [[59]]
    assert [each.steps for each in all_found if "gradient norm rose to 40" in each.what] == [
        [60]
    ]


def test_a_row_that_is_no_number_comes_first_and_is_no_lost_one(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        losses[90, 5] = np.nan
        losses[100, 0] += 5

    first, second = found(write(tmp_path / "run", plant))
    assert (first.kind, first.steps, first.rows[0].place) == ("not finite", [91], 5)
    assert np.isnan(first.rows[0].loss or 0) and (second.kind, second.steps) == ("spike", [101])


def test_the_sources_of_a_mixture_are_compared_with_themselves_and_drift_apart(
    tmp_path: Path,
) -> None:
    """Code is easier all along, which is no news; that prose gets worse again is."""
    base = write(tmp_path / "base", mixture=MIXTURE)
    sources = Lookback.of(base).table.sources

    def easier(losses: Any, lines: Any) -> None:
        losses[sources == 1] -= 1.0

    def drifting(losses: Any, lines: Any) -> None:
        easier(losses, lines)
        rise = np.maximum(0, np.arange(STEPS) - 60)[:, None] / 60
        losses[:] += np.where(sources == 0, rise, 0)

    assert found(write(tmp_path / "easier", easier, mixture=MIXTURE)) == []
    drifts = [
        each
        for each in found(write(tmp_path / "drift", drifting, mixture=MIXTURE))
        if each.kind == "drift"
    ]
    assert len(drifts) == 1 and drifts[0].what.startswith("the loss of prose rises again")


def test_a_slow_rank_and_waits_for_data_are_named(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        for line in lines:
            line.update(slowest_rank=3, slowest_share=0.3, data_wait_s=0.2)

    run = write(tmp_path / "run", plant)
    waits = "steps waited for data for 40% of their time"
    assert [each.what for each in found(run) if each.kind == "slow"] == [waits]
    lag = Lag(3, "a", 20, 95, 0.3, {"core": 0.7}, {"core": 0.1})
    Journal(run).append("lag", **asdict(lag), text=lag.text())
    for share in (math.nan, "much", None):  # lines that no run writes
        Journal(run).append("lag", rank=1, share=share)
    slow = [each for each in found(run) if each.kind == "slow"]
    assert [each.what for each in slow] == [waits, "rank 3 was the slowest from step 20 on"]
    assert slow[1].facts == [lag.text(), "journal.jsonl"]


def test_a_run_without_losses_of_rows_has_spikes_of_its_steps(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        losses[70] += 2

    run = write(tmp_path / "run", plant)
    (run / FOLDER / "rank-0000.bin").unlink()
    (spike,) = found(run)
    assert (spike.kind, spike.steps, spike.rows) == ("spike", [71], [])
    rows = StepBatches(Lookback.of(run)).rows_of(71)
    assert len(rows) == ROWS and {row.loss for row in rows} == {None}
    assert "without losses of rows" in next(format.run_lines(StepBatches(Lookback.of(run))))


def test_steps_of_which_rows_are_lost_have_the_logged_loss(tmp_path: Path) -> None:
    """One rank's file is cut: the mean of the others' rows is no loss of the step, and its rise no spike."""

    def plant(losses: Any, lines: Any) -> None:
        losses[:, 1::2] += 3

    run = write(tmp_path / "run", plant)
    back = Lookback.of(run)
    sums = {step: back.kept.of(step).sums for step in back.kept.steps}  # type: ignore[union-attr]
    for rank, kept in ((0, (*range(1, 81), *range(91, STEPS + 1))), (1, range(1, STEPS + 1))):
        with (run / FOLDER / f"rank-000{rank}.bin").open("wb") as file:
            for step in kept:
                own = sums[step][rank::2].astype(np.float32)
                file.write(packed(1, step, RankPart(rank, 2, 0, 1), own, np.full(4, 50)))
    batches = StepBatches(Lookback.of(run))
    steps, losses = batches.run.table.losses()
    assert [*steps] == [*range(1, 81), *range(91, STEPS + 1)]
    _, logged = batches.run.series("loss")
    assert np.allclose(losses, logged[steps - 1])
    told = next(format.step_lines(batches, 85))
    assert f"loss {logged[84]:.4f}," in told
    assert not [each for each in findings(batches) if each.kind == "spike"]


def test_lines_of_a_later_start_replace_those_before_and_damage_is_named(
    tmp_path: Path,
) -> None:
    run = write(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 100, "loss": 1.5, "grad_norm": 1.0}\n{"step": "x"}\n[1]\n\xff{\n{"step": 101, "lo'
        )
    back = Lookback.of(run)
    assert max(back.logged) == 100 and back.number(100, "loss") == 1.5
    assert len(back.damaged) == 4 and all(
        "metrics.jsonl, line " in text for text in back.damaged
    )
    assert sum("damaged: " in line for line in format.run_lines(StepBatches(back))) == 4


def test_a_step_is_told_with_its_rows_and_an_unknown_one_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "a run")
    lines = list(format.step_lines(StepBatches(Lookback.of(run)), 30))
    assert lines[0].startswith(f"{run}: step 30, 8 rows, loss ") and "nothing unusual" in lines
    assert sum(line.startswith("  row ") for line in lines) == ROWS
    for step in (0, -1, STEPS + 1, 10**20):
        with pytest.raises(
            ConfigError, match=f"step {step} of .* has no record(?s:.*)why '{run}' -"
        ):
            StepBatches(Lookback.of(run)).rows_of(step)
    values = json.loads(
        json.dumps(format.values(StepBatches(Lookback.of(run)), 30), allow_nan=False)
    )
    assert len(values["rows"]) == ROWS and values["findings"] == [] and values["missing"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no logged step yet"):
        Lookback.of(tmp_path)
    (tmp_path / FILE).write_text("nothing\n")
    with pytest.raises(RunError):
        Lookback.of(tmp_path)


def test_text_of_data_cannot_act_on_a_terminal() -> None:
    text = "\x1b]0;no\x07\x1b[31mred\r\x9b2J \u202ert\u2066 \u200b\ufeff \u2028 \ud800 fin\n\tplain \u0645\u200c\u06cc"
    shown = visible(text)
    for character in "\x1b\x07\r\x9b\u202e\u2066\u200b\ufeff\u2028\ud800":
        assert character not in shown
    assert (
        shown.endswith("fin\n\tplain \u0645\u200c\u06cc")
        and "\\x1b]0;no" in shown
        and "\\u202e" in shown
    )
    shown.encode()
    # Nor what an error quotes of it.
    assert str(Problem(text, text, text)) == f"{shown}\n  expected: {shown}\n  fix: {shown}"
