"""A referee inside a program: `with threefold.Referee(model, optimizer):` around the steps of a loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from threefold.errors import ConfigError
from threefold.referee.rank.recorder import RankRecorder, hang, rank_and_world
from threefold.referee.record import write_command

if TYPE_CHECKING:
    from threefold.referee.judge.verdict import CommandVerdict


class Referee:
    """Records the steps of a block, and judges them at its end. Every rank enters it.

    Args:
        model: the trained model, wrapped or not; calls of other modules are not recorded.
        optimizer: the optimizer that trains it.
        record: a folder that all ranks see, without a record in it.
        steps: number of steps recorded with their weights and gradients.
        keep: maximum size of the record of all ranks, in GiB.

    Attributes:
        verdict: on rank 0, after the block; None elsewhere, and if the block was left by an error.

    Raises:
        ConfigError: the folder has a record, or cannot be made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        record: str | Path = "referee-record",
        steps: int = 3,
        keep: float = 1.0,
    ) -> None:
        self.verdict: CommandVerdict | None = None
        self._folder = Path(record)
        self._rank, _ = rank_and_world()
        what = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if (self._folder / f"rank-{self._rank:05d}.jsonl").exists():
                what = f"the folder {record} has a record of the referee"
        except OSError as error:
            what = f"the folder {record} cannot be made ({error.strerror})"
        if what:
            raise ConfigError(
                what,
                expected="a new folder",
                fix=f'Referee(model, optimizer, record="{record}-2")',
            )
        # Of accelerate's optimizers, the one below.
        only = model, getattr(optimizer, "optimizer", optimizer)
        self._recorder = RankRecorder(
            self._folder, num_whole=steps, most_bytes=int(keep * 2**30), only=only
        )

    def __enter__(self) -> Self:
        if not self._rank:
            write_command(self._folder, sys.argv, None)
        hang(self._recorder)
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._recorder.guard(self._recorder.end)
        if kind is not None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        if not self._rank:
            from threefold.referee.judge.verdict import judge

            write_command(self._folder, sys.argv, 0)
            self.verdict = judge(self._folder)
            print("\n".join(self.verdict.lines()))
