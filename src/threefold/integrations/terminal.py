"""What a run shows on the terminal of rank 0: a live bar where there is a terminal, plain lines where there is none."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from threefold.jsonl import Metrics


class Terminal:
    """A tracker that prints each logged step and keeps a bar below it."""

    def __init__(self, console: Console, *, num_steps: int, done: int = 0) -> None:
        self._console = console
        self._num_steps = num_steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=done)
        self._bar.start()

    def log(self, metrics: Metrics) -> None:
        """Prints one logged step or evaluation."""
        if "eval_loss" in metrics:
            self._print(
                f"evaluation after step {metrics['step']}: {loss_text(metrics['eval_loss'])} over "
                f"{metrics['eval_tokens']:,} tokens"
            )
            return
        if "skipped" in metrics:
            self._print(f"{metrics['skipped']}: no update")
            return
        mfu = f"  mfu {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        self._print(
            f"step {metrics['step']:>{len(str(self._num_steps))}}/{self._num_steps}  loss {metrics['loss']:.4f}  "
            f"grad norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}  {metrics['step_time_s']:.2f} s/step  "
            f"{metrics['tokens_per_s']:,.0f} tokens/s{mfu}"
        )
        self._bar.update(self._task, completed=metrics["step"])

    def step(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        self._bar.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def loss_text(loss: float) -> str:
    """A loss with its perplexity."""
    import math

    return f"loss {loss:.4f} (perplexity {math.exp(min(loss, 700.0)):.2f})"
