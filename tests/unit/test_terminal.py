"""What rank 0 shows: heads that fit 100 columns on a terminal, whole lines elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import signal
import sys
from typing import Any

import pytest
from rich.file_proxy import FileProxy

from threefold.run.terminal import SAMPLE, Screen, Terminal, folded

STEP = {
    **{
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "step_time_s": 0.25,
        "tokens_per_s": 12345.6,
    },
    **{"peak_memory_bytes": 3 * 2**30, "mfu": 0.314},
}
HEAD = (
    "threefold 0.1.0  runs/a\n"
    "  data   0.7 code + 0.3 prose (bytes): 94,682 rows of 24,238,848 tokens in 1,723 documents, 1 token dropped; "
    "256 tokens a row\n"
    "  mesh   dp=2 x cp=2 x tp=2 on 8 ranks (cpu): " + "x" * 120
)


def screen(*, terminal: bool = False, **options: Any) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(file=out, force_terminal=terminal, width=140, **options), out


def test_a_head_fits_a_terminal_of_100_columns_and_keeps_whole_words() -> None:
    text = folded(HEAD, 100)
    lines = text.split("\n")
    assert all(len(line) <= 100 for line in lines if "x" * 120 not in line)
    assert "x" * 120 in text, "paths are not cut"
    assert [line[:9] for line in lines[:2]] == ["threefold", "  data   "] and lines[
        2
    ].startswith(" " * 9)
    assert " ".join(text.split()) == " ".join(HEAD.split())
    assert folded(f"{SAMPLE}{'word ' * 50}", 100) == f"{SAMPLE}{'word ' * 50}", (
        "a sample stays as it is"
    )


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO])
def test_output_that_cannot_be_written_stops_a_run_as_a_signal_does(
    reason: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the output the steps since the last checkpoint are still saved."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(reason, os.strerror(reason))

    asked: list[int] = []
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of the tests stays
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        shown = Screen(file=Full())
        # As while a bar is shown: what is written to it is printed.
        monkeypatch.setattr(sys, "stderr", FileProxy(shown, sys.stderr))
        shown.print("step 1")
        shown.print("step 2")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]
    assert capfd.readouterr().err == f"nothing can be printed any more: {os.strerror(reason)}\n"


def test_lines_stay_whole_without_a_terminal() -> None:
    for terminal in (False, True):
        found, out = screen(terminal=terminal)
        found.print(HEAD)
        assert (max(map(len, out.getvalue().split("\n"))) > 100) and (
            HEAD in out.getvalue()
        ) == (not terminal)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_model_writes_cannot_act_on_a_terminal(terminal: bool) -> None:
    console, out = screen(terminal=terminal)
    console.print(f"{SAMPLE}\x1b]0;title\x07a \u202e\x00b")
    assert out.getvalue() == f"{SAMPLE}\\x1b]0;title\\x07a \\u202e\\x00b\n"


def test_json_lines_have_a_kind_and_are_json(caplog: pytest.LogCaptureFixture) -> None:
    found, out = screen(as_json=True)
    terminal = Terminal(found, num_steps=10, done=0)
    with caplog.at_level(logging.INFO, "threefold"):
        found.print("a head\nof two lines [bold]")
        terminal.log(STEP)
        terminal.log({"step": 3, "eval_loss": 1.5, "eval_tokens": 10})
        terminal.log({"step": 4, "skipped": "step 4: the loss is not finite"})
        terminal.log({**STEP, "step": 5, "grad_norm": math.nan, "loss": math.inf})
        terminal.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in out.getvalue().splitlines()]
    assert [line["kind"] for line in lines] == ["text", "step", "evaluation", "skipped", "step"]
    assert lines[0]["text"] == "a head\nof two lines [bold]" and lines[1] == {
        "kind": "step",
        **STEP,
    }
    assert lines[4]["loss"] is None and lines[4]["grad_norm"] is None
    assert "step  3/10  loss 2.5000" in caplog.text, "logs stay as they are"


def test_quiet_prints_nothing_and_logs_all(caplog: pytest.LogCaptureFixture) -> None:
    found, out = screen(quiet=True)
    with caplog.at_level(logging.INFO, "threefold"):
        Terminal(found, num_steps=10, done=0).log(STEP)
        other, _ = screen(quiet=True, logs=False)
        other.print("of another rank")
    assert (
        out.getvalue() == "" and "loss 2.5000" in caplog.text and "another" not in caplog.text
    )


def test_a_terminal_has_a_live_line_with_loss_speed_memory_and_mfu() -> None:
    found, out = screen(terminal=True)
    terminal = Terminal(found, num_steps=10, done=0)
    terminal.log(STEP)
    assert (
        terminal._live_text(STEP)
        == "step 3/10  loss 2.5000  12,346 tokens/s  3.00 GiB  mfu 31.4%"
    )
    terminal.close()
    assert "step  3/10  loss 2.5000  grad norm 0.500" in out.getvalue()
