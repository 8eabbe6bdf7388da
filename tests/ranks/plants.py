"""Faults to plant in a rank before it trains; each is given the rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RANK = 2
STEP = 4


def stall_in_data(rank: int) -> None:
    """The data of one step never comes."""
    from threefold.training.loop import Window

    _before(Window, "read", rank, lambda: time.sleep(1000))


def stall_in_forward(rank: int) -> None:
    """One rank stops inside a phase that all are in."""
    from threefold.training import step

    _before(step, "forward_sums", rank, lambda: time.sleep(1000))


def late_in_every_forward(rank: int) -> None:
    """One rank waits for something of its own in each step, without a core."""
    from threefold.training.step import TrainStep

    plain = TrainStep._backward

    def backward(self: TrainStep, *args: Any) -> Any:
        time.sleep(0.1 if rank == RANK else 0.0)
        return plain(self, *args)

    TrainStep._backward = backward  # type: ignore[method-assign]


def memory_used_up(rank: int) -> None:
    """The device of one rank has no memory left, as torch says it."""
    import torch

    from threefold.training import step

    def fail() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB."
        )

    torch.cuda.memory._dump_snapshot = lambda path: Path(path).write_text(
        "what the allocator holds"
    )
    _before(step, "forward_sums", rank, fail)


def memory_used_up_while_groups_wait(rank: int) -> None:
    """As NCCL does it, groups are destroyed when all ranks of the node do it."""
    import torch.distributed as dist

    memory_used_up(rank)
    dist.destroy_process_group = lambda *args, **keys: time.sleep(1000)


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

    @contextmanager
    def forward_sums(model: Any, batch: Any, *args: Any, **options: Any) -> Iterator[Any]:
        calls[0] += 1
        factor = float("inf") if rank == RANK and calls[0] == STEP else 1.0
        handle = model.module.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: (
                output.register_hook(lambda gradient: gradient * factor) and None
                if output.requires_grad
                else None
            )
        )
        with plain(model, batch, *args, **options) as sums:
            handle.remove()
            yield sums

    step.forward_sums = forward_sums


def change_loss(here: bool, steps: Container[int]) -> None:
    """Makes the loss no number in some of the forwards, counted from 1, if it is `here`."""
    from threefold.training import step

    plain, calls = step.forward_sums, [0]

    @contextmanager
    def forward_sums(*args: Any, **options: Any) -> Iterator[Any]:
        with plain(*args, **options) as sums:
            calls[0] += 1
            if not here or calls[0] not in steps:
                yield sums
            else:
                nan = float("nan")
                changed = {
                    name: getattr(sums, name) * nan
                    for name in ("objective", "cross_entropy", "of_rows")
                }
                yield sums._replace(**changed)

    step.forward_sums = forward_sums


def _before(owner: Any, name: str, rank: int, do: Callable[[], None]) -> None:
    plain, calls = getattr(owner, name), [0]

    def planted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if rank == RANK and calls[0] == STEP:
            do()
        return plain(*args, **options)

    setattr(owner, name, planted)
