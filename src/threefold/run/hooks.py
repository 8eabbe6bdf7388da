"""Calls a program's hooks with plain facts, on rank 0: after logged steps, evaluations, saves, and at the end."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.errors import RunError
from threefold.jsonl import Metrics
from threefold.run.user_objects import name_of


@dataclass(frozen=True)
class Facts:
    """The argument of a hook.

    Attributes:
        run: the run's folder.
        step: the step after which the hook is called.
        metrics: on_step and on_eval: the line of metrics.jsonl, read-only; else empty.
        checkpoint: on_save: the folder of the complete checkpoint.
        reason: on_stop: `done`, `signal` or `hook`.
    """

    run: Path
    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    reason: str = ""


class Callback(Protocol):
    """Base class for `threefold.train(callbacks=)`; override the hooks that you need."""

    def on_step(self, facts: Facts) -> bool | None:
        """Called after a logged step; returning True stops the run."""

    def on_eval(self, facts: Facts) -> bool | None:
        """Called after an evaluation; returning True stops the run."""

    def on_save(self, facts: Facts) -> None:
        """A checkpoint is complete."""

    def on_stop(self, facts: Facts) -> None:
        """The run has ended."""


class Hooks:
    """A tracker that calls the hooks of some callbacks.

    Args:
        stop: asks all ranks to stop; called when on_step or on_eval returns True.
    """

    def __init__(self, callbacks: Sequence[Any], run: Path, stop: Callable[[], None]) -> None:
        self._callbacks, self._run, self._stop = callbacks, run, stop
        self._saved: int | None = None

    def log(self, metrics: Metrics) -> None:
        """A logged step or evaluation."""
        facts = Facts(self._run, metrics["step"], MappingProxyType(dict(metrics)))
        if "eval_loss" in metrics:
            answers = self._call("on_eval", facts)
        elif "loss" in metrics:
            answers = self._call("on_step", facts)
        else:
            return
        if any(answers):
            self._stop()

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete; a repeated report of it calls nothing."""
        if checkpoint.step != self._saved:
            self._saved = checkpoint.step
            self._call("on_save", Facts(self._run, checkpoint.step, checkpoint=checkpoint.path))

    def ended(self, step: int, reason: str) -> None:
        """The run has ended, and is saved."""
        self._call("on_stop", Facts(self._run, step, reason=reason))

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, name: str, facts: Facts) -> list[bool]:
        return [self._one(each, name, facts) for each in self._callbacks if hasattr(each, name)]

    def _one(self, callback: Any, name: str, facts: Facts) -> bool:
        try:
            answer = getattr(callback, name)(facts)
            return answer is not None and bool(answer == True)  # noqa: E712  (NumPy's and torch's too)
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"{name_of(callback)}.{name} raised {type(error).__name__} after step {facts.step}: {error} "
                f"({where.filename}, line {where.lineno})",
                expected="a hook that returns (True to stop the run); steps since the last checkpoint are not saved",
                fix="fix the hook and train again: the run resumes from its last checkpoint",
            ) from error
