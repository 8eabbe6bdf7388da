"""A loop of one's own in a run, for tests: on ranks, and as a script that can be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ranks.reference import TINY_LLAMA

ROWS = 42


class Windows:
    """Rows whose number says what is in them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        import torch

        tokens = torch.randint(67, (17,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def parts(sizes: dict[str, int], loss: Any = None, **settings: Any) -> tuple[Any, ...]:
    """Mesh, step, loader and scheduler."""
    import torch
    from torch.utils.data import DataLoader

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step = threefold.TrainStep(model, lr=1e-2, loss=loss)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.9)
    usual = {"batch_size": 8 // mesh.dp_size, "shuffle": True, "drop_last": True}
    plain = DataLoader(Windows(), **{**usual, **settings})
    return mesh, step, threefold.distribute(plain), scheduler


def by_hand(sizes: dict[str, int], until: int) -> list[tuple[float, float]]:
    """The numbers of the steps of a loop without a run."""
    mesh, step, loader, scheduler = parts(sizes)
    numbers: list[tuple[float, float]] = []
    while len(numbers) < until:
        for batch in loader:
            numbers.append(tuple(step(batch)))
            scheduler.step()
            if len(numbers) == until:
                break
    mesh.close()
    return numbers


def in_a_run(
    sizes: dict[str, int],
    folder: str,
    until: int,
    act: Callable[[Any, Any], None] = lambda run, mesh: None,
    *,
    loss: Any = None,
    config: Any = None,
    **settings: Any,
) -> tuple[list[tuple[float, float]], str | int]:
    """The numbers of the steps, and how it ended: 0, an exit code, or an error's text.

    Args:
        act: called in each step, before it ends.
    """
    import threefold

    mesh, step, loader, scheduler = parts(sizes, loss, **settings)
    numbers: list[tuple[float, float]] = []
    ended: str | int = 0
    try:
        with threefold.Run(
            folder, mesh=mesh, config={"audit.every": 3, **(config or {})}
        ) as run:
            run.load(step, loader, scheduler=scheduler)
            for batch in run.steps(loader, until=until, save_every=4):
                found = step(batch)
                numbers.append(tuple(found))
                scheduler.step()
                run.log(found)
                act(run, mesh)
        mesh.close()
    except SystemExit as error:
        ended = int(str(error.code))
    except threefold.errors.ThreefoldError as error:
        ended = str(error)
    return numbers, ended


def signal_in(
    step: int, number: int = signal.SIGTERM, rank: int = -1
) -> Callable[[Any, Any], None]:
    """Sends a signal to one rank in a step; -1: to the last one."""
    return partial(_signal, step, number, rank)


def _signal(step: int, number: int, rank: int, run: Any, mesh: Any) -> None:
    if run.step == step and mesh.rank == rank % mesh.world_size:
        while number == signal.SIGKILL and run.folder.checkpoints.newest() is None:
            time.sleep(0.01)  # it is being saved in the background
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    numbers, ended = in_a_run({}, sys.argv[1], 14, signal_in(int(sys.argv[2]), signal.SIGKILL))
    print(numbers)
    sys.exit(ended if isinstance(ended, int) else print(ended) or 1)
