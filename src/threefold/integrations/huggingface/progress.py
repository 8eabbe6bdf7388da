"""Where a resumed run of the Trainer goes on, and how much of it is left: arithmetic on positions, not on steps.

transformers divides the number of steps done by the steps of an epoch, which is right only while neither the ranks nor
the batch size change. Here the place is the position in the order, and what is left is counted from it with the sizes
of now.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

from threefold.integrations.huggingface.data import TrainLoader
from threefold.integrations.huggingface.state import SavedPlace, check_order


class Resumed:
    """A run that goes on from a checkpoint.

    Attributes:
        epoch: in which it goes on.
        batches_left: of this rank in that epoch, where it goes on inside it; 0: at its head.
    """

    def __init__(self, saved: SavedPlace) -> None:
        self.saved = saved
        self.epoch = 0
        self.batches_left = 0
        self._updates_left = 0

    def go_to_place(self, loader: TrainLoader, *, accumulation: int) -> None:
        """Brings the loader to the place, or to the head of the next epoch where this one is over.

        Raises:
            DataError: the place belongs to another order.
        """
        check_order(self.saved.loader, loader=loader)
        self.epoch, position = self.saved.loader["epoch"], self.saved.loader["position"]
        left = loader.batches_left()
        if not left:
            self.epoch += 1
        self.batches_left = left if position else 0
        self._updates_left = math.ceil(self.batches_left / accumulation)

    def plan(self, args: Any, *, per_epoch: int, max_steps: int) -> tuple[int, int]:
        """(epochs until the end, steps at the end), from the steps of a whole epoch with the sizes of now."""
        # Steps that would have led here, had all been made with these sizes.
        done = self.epoch * per_epoch + (per_epoch - self._updates_left if self.batches_left else 0)
        if args.max_steps > 0:
            return math.ceil((done + max_steps - self.saved.step) / per_epoch), max_steps
        return math.ceil(args.num_train_epochs), self.saved.step + max(0, max_steps - done)


class EpochByRows(TrainerCallback):
    """Keeps `state.epoch` true in an epoch that began in its middle; elsewhere transformers' own is left."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resumed, loader = self._trainer._resumed, self._trainer._train_loader
        if resumed is None or not resumed.batches_left or int(state.epoch - 1e-9) != resumed.epoch:
            return
        state.epoch = resumed.epoch + 1 - loader.batches_left() / max(len(loader), loader.batches_left(), 1)
