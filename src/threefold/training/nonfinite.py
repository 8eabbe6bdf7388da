"""A loss or a gradient that is not finite on any rank is noticed by all ranks, and updates nothing.

So is a step in which nothing is trained on: its loss is a mean over no tokens.

The step handles both on the device: a loss that is not finite makes its rank's gradient so, the reduction of gradients
carries that to all ranks, and the optimizer changes nothing if the norm is not finite. The norm is read here: at once
on a CPU, one step later on an accelerator, where reading it at once would let the device run dry. Which rank it was
travels over the rendezvous store, and only when it has happened.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.errors import RunError, ranks_text, rows_text
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.training.numbers import StepResult

log = logging.getLogger("threefold")


# Skipping that does not help by then does not help at all.
MOST_IN_A_ROW = 10


@dataclass(frozen=True)
class Policy:
    """The treatment of a step whose loss or gradient is not finite.

    Attributes:
        skip: continue without its update, until `MOST_IN_A_ROW` of them follow one another; else the run ends.
        run: the folder of the run, for messages.
        program: its loop is a program's own.
    """

    skip: bool
    run: str = "RUN"
    program: bool = False

    def fix(self, step: int, *, empty: bool) -> str:
        """What to do about a step that ends the run."""
        if self.program:
            skip = "config={'train.nonfinite': 'skip'}"
            return f"look at the rows: threefold data order {self.run} --step {step}; or threefold.Run(..., {skip})"
        longer = (
            "rows that reach an answer: a larger --data.seq_len or --train.global_batch; "
            if empty
            else ""
        )
        return (
            f"{longer}look at the rows: threefold data order {self.run} --step {step} --show; "
            f"leave them out: --data.skip '[[{step}, {step}]]'; or --train.nonfinite skip"
        )


class NonfiniteError(RunError):
    """A step was not finite, or had nothing to train on; all ranks raise it."""

    how = "numbers"

    @classmethod
    def of_step(
        cls, step: int, ranks: Iterable[int], what: str, **parts: str
    ) -> "NonfiniteError":
        error = cls(what, **parts)
        error.step, error.ranks = step, tuple(ranks)
        return error


class _Unread(NamedTuple):
    number: int
    norm: Tensor
    target_tokens: Tensor
    copied: Any
    losses: tuple[Tensor, ...]
    rows: list[list[int]]


class Finite:
    """Reads the norm of each step; every rank reads the same and concludes the same.

    Attributes:
        skipped: steps without an update since this process began.
    """

    def __init__(self, mesh: Mesh, policy: Policy) -> None:
        self._mesh = mesh
        self._policy = policy
        self._unread: list[_Unread] = []
        self._in_a_row = 0
        self.skipped = 0

    def after(
        self, step: int, result: StepResult, rows: list[list[int]], *, now: bool
    ) -> list[Values]:
        """Takes a step and reads the ones before it; `now` reads this one too, before anything is built on it.

        Args:
            rows: of this rank, by their numbers, in each micro-batch.

        Returns:
            for each step that was skipped: `step` and `skipped`, the reason.

        Raises:
            RunError: a step was not finite and the policy is to end, or too many in a row were not.
        """
        on_cpu = self._mesh.device.type == "cpu"
        norm, copied = (result.grad_norm, None) if on_cpu else copy_to_host(result.grad_norm)
        self._unread.append(
            _Unread(step, norm, result.target_tokens, copied, result.micro_losses, rows)
        )
        ready = len(self._unread) - (0 if now or on_cpu else 1)
        reports = [self._read(self._unread.pop(0)) for _ in range(ready)]
        return [skipped for skipped in reports if skipped is not None]

    def _read(self, step: _Unread) -> Values | None:
        if step.copied is not None:
            step.copied.synchronize()
        norm = step.norm.item()
        if math.isfinite(norm):
            self._in_a_row = 0
            return None
        empty = not step.target_tokens.item()
        wrong = (
            []
            if empty
            else [
                number
                for number, loss in enumerate(step.losses)
                if not math.isfinite(loss.item())
            ]
        )
        own = {
            "wrong": [row for number in wrong for row in step.rows[number]] if wrong else None,
            "rows": step.rows,
        }
        what, ranks = self._mesh.decide(
            "nonfinite",
            own,
            lambda parts: [_what(step.number, norm, parts, empty=empty), [*_wrong(parts)]],
        )
        self._in_a_row += 1
        self.skipped += 1
        if not self._policy.skip:
            needed = "a token to train on in each step" if empty else "finite numbers"
            raise NonfiniteError.of_step(
                step.number,
                ranks,
                what,
                expected=f"{needed}; the weights are as step {step.number - 1} left them, and nothing is saved",
                fix=self._policy.fix(step.number, empty=empty),
            )
        log.warning("%s: skipped", what)
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonfiniteError.of_step(
                step.number,
                ranks,
                f"{what}: the {_ordinal(self._in_a_row)} step in a row without an update",
                expected=f"fewer than {MOST_IN_A_ROW} in a row: skipping does not help",
                fix="resume from a checkpoint with a smaller rate"
                + ("" if self._policy.program else ", --optimizer.lr")
                + f"; or look at the rows: threefold data order {self._policy.run} --step {step.number}"
                + ("" if self._policy.program else " --show"),
            )
        return {"step": step.number, "skipped": what}


def copy_to_host(value: Tensor) -> tuple[Tensor, Any]:
    """A copy in progress, and the event that marks its end."""
    host = torch.empty_like(value, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def _wrong(parts: Sequence[Values]) -> dict[int, list[int]]:
    return {rank: part["wrong"] for rank, part in enumerate(parts) if part["wrong"] is not None}


def _what(step: int, norm: float, parts: Sequence[Values], *, empty: bool = False) -> str:
    wrong = _wrong(parts)
    if not wrong:
        read = rows_text(
            sorted({row for part in parts for rows in part["rows"] for row in rows})
        )
        if empty:
            return f"step {step}: no token of its rows is trained on; the step read {read}"
        return f"step {step}: the gradient's norm is {norm}, with finite losses on all ranks; the step read {read}"
    # The cp and tp ranks of a dp rank read the same rows.
    rows = list(dict.fromkeys(row for part in wrong.values() for row in part))
    return f"step {step}: the loss is not finite on {ranks_text(wrong)}: {rows_text(rows)}"


def _ordinal(number: int) -> str:
    ending = (
        "th"
        if number % 100 in (11, 12, 13)
        else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
