"""Folders that transformers loads, written and verified while a run continues (`checkpoint.export_every`).

The first rank writes them from the checkpoint of that step, one process with the whole model on its CPU; the others
wait for it outside of collectives. A step that is replayed is written again.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.config.paths import EXPORT_FOLDER
from threefold.export.model_folder import export
from threefold.run.checkpointer import Checkpointer
from threefold.training.progress import Progress

_TICK_S = 5.0


class Exports:
    """Saves like the run's checkpointer, then writes the exports due; every rank calls it in the same way.

    Attributes:
        progress: where this rank is, in the steps too.
    """

    def __init__(self, checkpointer: Checkpointer, *, say: Callable[[str], None]) -> None:
        self.progress = Progress()
        self._checkpointer, self._say = checkpointer, say

    def save(self, step: int, eval_loss: float | None, due: bool) -> None:
        """As `Checkpointer.save`; also RunError if the folder reloads to another model."""
        self._checkpointer.save(step, eval_loss, due)
        every = self._checkpointer.config.checkpoint.export_every
        if due and every and step % every == 0:
            self.progress.enter("export")
            self._checkpointer.saver.wait()
            self._checkpointer.mesh.share("export", lambda: self._write(step))

    def _write(self, step: int) -> None:
        run = self._checkpointer.folder.path
        checkpoint = next(
            (each for each in CheckpointFolder(run).complete() if each.step == step), None
        )
        if checkpoint is None:  # it could not be saved, and the run continues all the same
            return
        to = run / EXPORT_FOLDER / checkpoint.path.name
        shutil.rmtree(to, ignore_errors=True)
        trusted = self._checkpointer.config.model.trust_remote_code
        with _ticking(self.progress):
            done = export(checkpoint.path, to, trust_remote_code=trusted)
        self._say(f"exported after step {step}: {to}; {done.verified}")


@contextmanager
def _ticking(progress: Progress) -> Iterator[None]:
    """Reports progress of this rank meanwhile: a large model takes long."""
    stopped = threading.Event()

    def tick() -> None:
        while not stopped.wait(_TICK_S):
            progress.tick()

    thread = threading.Thread(target=tick, name="export", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
