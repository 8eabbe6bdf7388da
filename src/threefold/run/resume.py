"""What is kept of a run and when, and where a run goes on: the checkpoints of one run, from the ranks' side.

Nothing of a checkpoint is loaded before its sizes and checksums were compared (the ranks share the files among them)
and before it is known to belong to this run. Until then nothing in the run's folder is changed.
"""

from __future__ import annotations

import json
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
from threefold.checkpoint.layout import Checkpoint, newest_undamaged
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
    """Saves and resumes the state of a run; every rank has one and calls it alike."""

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
        best = json.loads(mesh.share("best", lambda: json.dumps(folder.checkpoints.best())))
        self._best: float | None = best[1] if best else None
        self._saver: Saver | None = None
        self._held: list[run_state.Holding] | None = None
        # Adapters mean nothing beside other weights than those that they were trained beside.
        adapted = bool(config.model.lora.r)
        self._base = mesh.once_per_host("base", lambda: load.fingerprint(config.model)) if adapted else None

    def start(self) -> None:
        """Makes ready to save; called when the state is the one that training begins with."""
        asked = self._config.checkpoint
        # Only the last state is saved: nothing would run beside it, and a copy would cost memory for nothing.
        once = not asked.every and not (self._config.eval.source and self._config.eval.every)
        self._saver = Saver(
            self._mesh,
            self._parts,
            background=asked.mode == "async" and not once,
            go_on=asked.on_error == "continue",
        )

    def keep(self, step: int, eval_loss: float | None, due: bool) -> None:
        """Saves after `step` where it is due, or where the evaluation loss is the best so far; every rank calls it.

        Raises:
            RunError: the save before, or this one, failed.
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
        """Called after every step; RunError on all ranks where a save in the background failed."""
        if self._saver is not None:
            self._saver.notice(step)

    def finish(self) -> None:
        """Returns when all is saved; RunError on all ranks where it could not be."""
        if self._saver is not None:
            self._saver.wait()

    def linger(self) -> None:
        """Lets a save that is under way end before a failed run does."""
        if self._saver is not None:
            self._saver.linger(_LINGER_S)

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
        """Reads the checkpoint that the run folder found; returns the last step done (0 where there is none).

        Raises:
            CheckpointError: it belongs to another model or seed. DataError: to other data or another order.
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
            # The ranks' streams mean nothing on another mesh; those of step 1 must not come again either.
            place = (self._config.train.seed, checkpoint.step, self._mesh.dp_rank, self._mesh.cp_rank)
            torch.manual_seed(seed_of("a resume on another mesh", *place))
        # Until every rank has read it, no rank may begin what could remove it.
        self._mesh.decide("resumed", "", lambda parts: "")
        return checkpoint.step


def undamaged(folder: RunFolder, mesh: Mesh) -> RunFolder:
    """The run folder with the newest of its checkpoints that is as it was written; every rank calls it.

    Why one is passed over is printed once.

    Raises:
        CheckpointError: the one that was asked for is damaged, or all are.
    """

    def damage(checkpoint: Checkpoint) -> str | None:
        own = checkpoint.damage(share=(mesh.rank, mesh.world_size))
        reasons = mesh.decide("damage", json.dumps(own), lambda parts: json.dumps([json.loads(p) for p in parts]))
        return next((reason for reason in json.loads(reasons) if reason is not None), None)

    chosen, passed = newest_undamaged(folder.candidates, damage)
    resuming = folder.resuming(chosen, passed)
    if mesh.rank == 0:
        for checkpoint, reason in passed:
            sys.stderr.write(f"passed over {checkpoint.path}: {reason}\n")
    return resuming
