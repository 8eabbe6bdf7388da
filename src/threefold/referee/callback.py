"""The referee for transformers' Trainer, TRL and others that take callbacks: judges their training at its end."""

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from threefold.referee.block import Referee


class RefereeCallback(TrainerCallback):
    """Judges a training like `threefold.Referee`, from its first step to its end; takes the same settings.

    Attributes:
        verdict: on rank 0, after the training.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings, self._block = settings, ExitStack()
        self.verdict: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._referee = Referee(kwargs["model"], kwargs["optimizer"], **self._settings)
        self._block.enter_context(self._referee)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._block.close()
        self.verdict = self._referee.verdict
