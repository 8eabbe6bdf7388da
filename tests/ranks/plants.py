"""Faults to plant in a rank before it trains; each is given the rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

RANK = 2
STEP = 4


def stall_in_data(rank: int) -> None:
    """The data of one step never comes."""
    from threefold.training.loop import _Window

    _before(_Window, "read", rank, lambda: time.sleep(1000))


def stall_in_forward(rank: int) -> None:
    """One rank stops inside a phase that all are in."""
    from threefold.training import step

    _before(step, "forward_sums", rank, lambda: time.sleep(1000))


def not_a_number(rank: int) -> None:
    """The loss of one step is not a number on the tp ranks of one dp rank."""
    change_loss(rank // 2 == RANK // 2, {STEP})


def not_a_number_again_and_again(rank: int) -> None:
    """As `not_a_number`, in every step from then on."""
    change_loss(rank // 2 == RANK // 2, range(STEP, 1000))


def infinite_gradient(rank: int) -> None:
    """One rank's gradient overflows behind a finite loss."""
    from threefold.training import step

    plain, calls = step.forward_sums, [0]

    def forward_sums(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if rank == RANK and calls[0] == STEP:
            handle = model.module.get_input_embeddings().register_forward_hook(
                lambda module, inputs, output: output.register_hook(lambda gradient: gradient * float("inf")) and None
            )
            sums = plain(model, batch, *args, **options)
            handle.remove()
            return sums
        return plain(model, batch, *args, **options)

    step.forward_sums = forward_sums


def change_loss(here: bool, steps: Container[int]) -> None:
    """Makes the loss no number in some of the forwards, counted from 1, if it is `here`."""
    from threefold.training import step

    plain, calls = step.forward_sums, [0]

    def forward_sums(*args: Any, **options: Any) -> Any:
        sums = plain(*args, **options)
        calls[0] += 1
        if not here or calls[0] not in steps:
            return sums
        return type(sums)(sums.objective * float("nan"), sums.cross_entropy * float("nan"), sums.router_logits)

    step.forward_sums = forward_sums


def _before(owner: Any, name: str, rank: int, do: Callable[[], None]) -> None:
    plain, calls = getattr(owner, name), [0]

    def planted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if rank == RANK and calls[0] == STEP:
            do()
        return plain(*args, **options)

    setattr(owner, name, planted)
