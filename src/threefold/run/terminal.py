"""Output of a run on rank 0: lines, with progress bars below them on a terminal; or JSON lines; or nothing.

On a terminal long lines of the head are folded at 100 columns. Elsewhere, and in the rank's log file, lines stay whole,
so that they can be searched.
"""

import logging
import math
import os
import signal
import sys
import textwrap
from contextlib import ExitStack, suppress
from typing import Any

from rich.console import Console

from threefold.errors import visible
from threefold.jsonl import Metrics, Values, as_json
from threefold.progress_bars import Bar, Bars

log = logging.getLogger("threefold")

SAMPLE = "  | "
_WIDTH = 100
# Where the text of a folded line continues: below that of the head's entries.
_INDENT = " " * 9


class Screen(Console):
    """The terminal; all output is also logged.

    Once its reader is gone (`| head`, a closed terminal), or its disk is full, the run stops as on a signal, and
    nothing is printed.

    Attributes:
        bars: for long operations.
        as_json: each line is an object with its `kind`; plain text has the kind `text`.
    """

    def __init__(
        self, *, quiet: bool = False, logs: bool = True, as_json: bool = False, **options: Any
    ) -> None:
        """Args:
        quiet: nothing is printed.
        logs: output, printed or not, goes to the rank's log file.
        options: for rich's Console.
        """
        options.setdefault("force_terminal", sys.stdout.isatty())  # see Bars
        super().__init__(quiet=quiet, soft_wrap=True, markup=False, highlight=False, **options)
        self.as_json, self._logs = as_json, logs
        self.bars = Bars(self, quiet=quiet or as_json)

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(part, str) for part in objects):
            self._show(" ".join(objects), logging.INFO, **options)
        else:
            super().print(*objects, **options)

    def _show(self, text: str, level: int, **options: Any) -> None:
        # A model's text could look like an error's.
        if self._logs and not text.startswith(SAMPLE):
            log.log(level, "%s", text)
        if self.as_json:
            self._write({"kind": "text", "text": text}, options)
        else:
            text = visible(text)
            super().print(
                folded(text, min(self.width, _WIDTH)) if self.is_terminal else text, **options
            )

    def warn(self, text: str) -> None:
        """Prints a text, which is logged as a warning."""
        self._show(text, logging.WARNING)

    def tell(self, kind: str, values: Metrics, text: str) -> None:
        """Prints a text, or the values that it was made from."""
        if not self.as_json:
            self.print(text)
            return
        if self._logs:
            log.info("%s", text)
        self._write({"kind": kind, **values}, {})

    def _write(self, values: Metrics, options: Values) -> None:
        super().print(as_json(values), **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            # rich knows a closed pipe; a closed terminal and a full disk are no reason to lose steps either.
            # Not by sys.stderr, which may be a bar's and print here.
            with suppress(OSError):
                os.write(2, f"nothing can be printed any more: {error.strerror}\n".encode())
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not callable(signal.getsignal(signal.SIGTERM)):  # training has not begun
            raise SystemExit(128 + signal.SIGPIPE)
        os.kill(os.getpid(), signal.SIGTERM)


def folded(text: str, width: int) -> str:
    """A text whose long lines are folded between words; paths and commands stay whole."""

    def fold(line: str) -> str:
        if len(line) <= width or line.startswith(SAMPLE):
            return line
        how: dict[str, Any] = {
            "break_long_words": False,
            "break_on_hyphens": False,
            "drop_whitespace": True,
        }
        begin = line[: len(line) - len(line.lstrip())]
        own = textwrap.wrap(
            line.strip(), width, initial_indent=begin, subsequent_indent=_INDENT, **how
        )
        return "\n".join(own)

    return "\n".join(map(fold, text.split("\n")))


def evaluated(metrics: Metrics, digits: int = 4) -> str:
    """The figures of an evaluation, from its metrics."""
    loss = f"loss {metrics['eval_loss']:.{digits}f}"
    if "eval_pairs" in metrics:
        return f"{loss}  {_of_pairs(metrics, 'eval_')} over {metrics['eval_pairs']:,} pairs"
    if "eval_count" in metrics:
        return f"{loss} over a count of {metrics['eval_count']:,}"
    perplexity = math.exp(min(metrics["eval_loss"], 700.0))
    return f"{loss} (perplexity {perplexity:.{digits - 2}f}) over {metrics['eval_tokens']:,} tokens"


def _of_pairs(metrics: Metrics, prefix: str = "") -> str:
    margin, accuracy = (metrics[f"{prefix}reward_{name}"] for name in ("margin", "accuracy"))
    return f"margin {margin:.4f}  accuracy {accuracy:.1%}"


def evaluated_tasks(metrics: Metrics) -> str:
    """The metrics of tasks, as text; empty without tasks."""
    figures = {
        name.removeprefix("task_"): value
        for name, value in metrics.items()
        if name.startswith("task_")
    }
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


class Terminal:
    """A tracker that prints each logged step, with a live bar below if the output is a terminal."""

    def __init__(self, screen: Screen, *, num_steps: int, done: int) -> None:
        self._screen, self._num_steps = screen, num_steps
        self._compares = True
        self._open = ExitStack()
        self._bar = Bar()
        if screen.is_terminal:  # elsewhere the lines of the steps show it
            self._bar = self._open.enter_context(
                screen.bars.show("training", num_steps, done=done)
            )

    def log(self, metrics: Metrics) -> None:
        """Prints one logged step or evaluation."""
        kind = "step"
        if "eval_loss" in metrics:
            kind = "evaluation"
            line = f"evaluation after step {metrics['step']}: {evaluated(metrics)}"
        elif tasks := evaluated_tasks(metrics):
            kind = "tasks"
            line = f"tasks after step {metrics['step']}: {tasks}"
        elif "skipped" in metrics:
            kind = "skipped"
            line = f"{metrics['skipped']}: no update"
        else:
            mfu = f"  mfu {metrics['mfu']:.1%}" if "mfu" in metrics else ""
            rewards = f"  {_of_pairs(metrics)}" if "reward_margin" in metrics else ""
            line = (
                f"step {metrics['step']:>{len(str(self._num_steps))}}/{self._num_steps}  loss {metrics['loss']:.4f}"
                f"{rewards}  grad norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}  "
                f"{metrics['step_time_s']:.2f} s/step  {metrics['tokens_per_s']:,.0f} tokens/s{mfu}"
            )
            if "estimated_memory_bytes" in metrics and self._compares:
                self._compares = False  # once
                held, estimated = (
                    metrics[f"{name}_memory_bytes"] / 2**30 for name in ("peak", "estimated")
                )
                line += f"\n  memory: {held:.2f} GiB were allocated at the peak, {estimated:.2f} estimated"
            self._bar.at(metrics["step"], self._live_text(metrics))
        self._screen.tell(kind, metrics, line)

    def _live_text(self, metrics: Metrics) -> str:
        """The text before the live bar."""
        parts = [f"step {metrics['step']:,}/{self._num_steps:,}", f"loss {metrics['loss']:.4f}"]
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
        parts += (
            [f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB"]
            if "peak_memory_bytes" in metrics
            else []
        )
        parts += [f"mfu {metrics['mfu']:.1%}"] if "mfu" in metrics else []
        return "  ".join(parts)

    def close(self) -> None:
        self._open.close()
