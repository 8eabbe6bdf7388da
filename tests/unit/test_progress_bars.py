"""Bars: drawn on a terminal after a second, lines elsewhere after ten, nothing when quiet, and gone when it is over."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from threefold import progress_bars
from threefold.progress_bars import Bars
from threefold.run.terminal import Screen


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(progress_bars.time, "monotonic", found)
    yield found


def shown(*, terminal: bool) -> tuple[Bars, io.StringIO]:
    out = io.StringIO()
    return Bars(
        Console(
            file=out,
            force_terminal=terminal,
            width=100,
            soft_wrap=True,
            _environ={"TERM": "xterm"},
        )
    ), out


def test_lines_come_every_ten_seconds_where_there_is_no_terminal(clock: Clock) -> None:
    found, out = shown(terminal=False)
    for _ in found.track(list(range(40)), "evaluation"):
        clock.now += 1
    assert (
        out.getvalue()
        == "evaluation: 25%\nevaluation: 50%\nevaluation: 75%\nevaluation: 100%\n"
    )
    with found.show("preparing") as bar:
        clock.now += 11
        bar.at(3, total=12)
        clock.now += 11
        bar.at(1200, "joining")
    assert out.getvalue().endswith("preparing: 25%\njoining: 10000%\n")


def test_what_is_short_shows_nothing(clock: Clock) -> None:
    for terminal in (False, True):
        found, out = shown(terminal=terminal)
        for _ in found.track([1, 2, 3], "evaluation"):
            clock.now += 0.1
        with found.show("saving"):
            pass
        assert "evaluation" not in out.getvalue() and "saving" not in out.getvalue()


def test_a_terminal_has_bars_below_one_another(clock: Clock) -> None:
    found, out = shown(terminal=True)
    with found.show("training", 100, done=20) as training:
        clock.now += 2
        training.at(25, "step 25/100  loss 2.5")
        with found.show("evaluation", 4) as evaluation:
            clock.now += 2
            evaluation.advance(2)
            found._live.refresh()  # type: ignore[union-attr]
        text = out.getvalue()
        assert (
            "step 25/100  loss 2.5" in text
            and "25%" in text
            and "evaluation" in text
            and "50%" in text
        )
        assert found._live is not None
    assert found._live is None


def test_errors_leave_no_bar_behind(clock: Clock) -> None:
    found, _ = shown(terminal=True)
    with pytest.raises(ValueError), found.show("admission"):
        raise ValueError
    assert found._live is None


def test_quiet_ones_show_nothing(clock: Clock) -> None:
    out = io.StringIO()
    quiet = Bars(Console(file=out, force_terminal=True), quiet=True)
    for _ in quiet.track(iter(range(50)), "evaluation", 50):
        clock.now += 5
    assert out.getvalue() == ""


def test_silent_process_shows_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "_silent", False)
    progress_bars.silence()
    found, out = shown(terminal=False)
    for _ in found.track(list(range(40)), "preparing"):
        clock.now += 1
    assert out.getvalue() == ""


def test_a_notebook_or_ci_that_asks_for_colours_gets_no_cursor_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_terminal
    assert not Bars().console.is_terminal and not Screen().is_terminal
