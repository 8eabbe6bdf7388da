"""What a run saves and when, and where it resumes: the checkpoints of one run, on the ranks' side.

A checkpoint is loaded only after its sizes and checksums were compared (the ranks share the files) and after it is
known to belong to this run. Until then, nothing in the run's folder changes.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from threefold import __version__
from threefold.checkpoint import state as run_state
from threefold.checkpoint.boxes import Index
from threefold.checkpoint.layout import newest_undamaged
from threefold.checkpoint.manifest import read_manifest, refuse_other, refuse_other_base
from threefold.checkpoint.saver import Job, Saver
from threefold.checkpoint.seal import Seal
from threefold.checkpoint.tensors import Part
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.data.permutation import seed_of
from threefold.mesh.mesh import Mesh
from threefold.model import load
from threefold.model.build import ParallelModel
from threefold.model.load import architecture_of
from threefold.run.folder import RunFolder

_LINGER_S = 60.0


class Keeper:
    """Saves and resumes the state of a run. Every rank has one and calls it in the same way."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        mesh: Mesh,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loader: TokenLoader,
        architecture: PretrainedConfig,
    ) -> None:
        self._config = config
        self._folder = folder
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._architecture = architecture
        best = mesh.share("best", folder.checkpoints.best)
        self._best: float | None = best[1] if best else None
        self._saver: Saver | None = None
        self._held: list[run_state.Holding] | None = None
        # Adapters only work with the base weights they were trained on.
        adapted = bool(config.model.lora.r)
        self._base = mesh.once_per_host("base", lambda: load.fingerprint(config.model)) if adapted else None

    def start(self) -> None:
        """Prepares to save; call this when the state is the one that training begins with."""
        asked = self._config.checkpoint
        # Only the last state is saved: no steps would run in parallel, so a copy would waste memory.
        once = not asked.every and not (self._config.eval.source and self._config.eval.every)
        self._saver = Saver(
            self._mesh,
            self._parts,
            background=asked.mode == "async" and not once,
            continue_on_error=asked.on_error == "continue",
        )

    def keep(self, step: int, eval_loss: float | None, due: bool) -> None:
        """Saves after `step` if a save is due or the evaluation loss is the best so far; every rank calls it.

        Raises:
            RunError: the previous save, or this one, failed.
        """
        better = eval_loss is not None and (self._best is None or eval_loss < self._best)
        if not (due or better):
            return
        assert self._saver is not None
        checkpoints = self._folder.checkpoints
        manifest = self._manifest(step)
        best = eval_loss if better else None

        def commit(seals: Mapping[str, Seal]) -> None:
            checkpoints.commit(step, manifest, {f"state/{name}": seal for name, seal in seals.items()})
            if best is not None:
                checkpoints.mark_best(step, best)
            checkpoints.prune(self._config.checkpoint.keep, keep_every=self._config.checkpoint.keep_every)

        self._saver.save(
            Job(
                step,
                checkpoints.partial(step) / "state",
                begin=lambda: checkpoints.begin(step),
                commit=commit,
                abandon=lambda: checkpoints.abandon(step),
            )
        )
        if better:
            self._best = eval_loss

    def notice(self, step: int) -> None:
        """Call this after every step; raises RunError on all ranks if a background save failed."""
        if self._saver is not None:
            self._saver.notice(step)

    def finish(self) -> None:
        """Waits until everything is saved; raises RunError on all ranks if a save failed."""
        if self._saver is not None:
            self._saver.wait()

    def linger(self) -> None:
        """Gives a running save time to finish before a failed run ends."""
        if self._saver is not None:
            self._saver.join(_LINGER_S)

    def _parts(self) -> list[Part]:
        state = run_state.state_of(self._model.module, self._optimizer)
        if self._held is None:
            self._held = run_state.holdings(state, self._mesh)
        return run_state.parts(state, self._held, self._mesh)

    def _manifest(self, step: int) -> dict[str, Any]:
        return {
            "mesh": list(self._mesh.topology.sizes),
            "device": self._mesh.device.type,
            "data": self._loader.state_dict(),
            "seed": self._config.train.seed,
            "architecture": architecture_of(self._architecture),
            "config": self._config.model_dump(mode="json"),
            "base": self._base,
            "versions": {
                "threefold": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }

    def resume(self) -> int:
        """Reads the checkpoint that the run folder found; returns the last step done (0 if there is no checkpoint).

        Raises:
            CheckpointError: it belongs to another model or seed. DataError: it belongs to other data or another order.
        """
        checkpoint = self._folder.resume
        if checkpoint is None:
            return 0
        manifest = read_manifest(checkpoint)
        refuse_other(manifest, self._config, self._architecture, checkpoint)
        if self._config.model.lora.r:
            refuse_other_base(manifest, self._base, self._config, checkpoint)
        self._loader.load_state_dict(manifest["data"])
        index = Index.read(checkpoint.state)
        state = run_state.state_of(self._model.module, self._optimizer)
        run_state.fit(state, index)
        run_state.read_into(state, checkpoint.state, index, self._mesh)
        if tuple(manifest["mesh"]) == self._mesh.topology.sizes:
            run_state.set_random_state(run_state.read_random_state(checkpoint.state, index, self._mesh), self._mesh)
        else:
            # The saved random states do not apply to another mesh, and those of step 1 must not repeat either.
            place = (self._config.train.seed, checkpoint.step, self._mesh.dp_rank, self._mesh.cp_rank)
            torch.manual_seed(seed_of("a resume on another mesh", *place))
        # Until every rank has read the checkpoint, no rank may start anything that could remove it.
        self._mesh.decide("resumed", "", lambda parts: "")
        return checkpoint.step


def undamaged(folder: RunFolder, mesh: Mesh) -> RunFolder:
    """Returns the run folder with its newest undamaged checkpoint; every rank calls it.

    The reason for skipping a checkpoint is printed once.

    Raises:
        CheckpointError: the requested checkpoint is damaged, or all are.
    """

    chosen, passed = newest_undamaged(folder.candidates, lambda each: run_state.damage_found(each, mesh))
    resuming = folder.resuming(chosen, passed)
    if mesh.rank == 0:
        for checkpoint, reason in passed:
            sys.stderr.write(f"passed over {checkpoint.path}: {reason}\n")
    return resuming
