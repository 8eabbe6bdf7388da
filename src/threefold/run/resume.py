"""Saves and resumes a run: its checkpoints, on the side of the ranks.

A checkpoint is loaded only after its sizes and checksums were compared (the ranks share the files) and after it is
known to belong to this run. Until then, nothing in the run's folder changes.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from threefold import __version__
from threefold.audit import record as audit_record
from threefold.checkpoint import state as run_state
from threefold.checkpoint.boxes import Index
from threefold.checkpoint.layout import newest_undamaged
from threefold.checkpoint.manifest import (
    Change,
    architecture_of,
    changes,
    read_manifest,
    refuse_other,
    refuse_other_base,
    refuse_unconfirmed,
)
from threefold.checkpoint.saver import Job, Saver
from threefold.checkpoint.seal import Seal, sync
from threefold.checkpoint.tensors import Part
from threefold.config.paths import FORMER, with_absolute_paths
from threefold.config.peak_rate import peak_rate
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.data.permutation import seed_of
from threefold.data.rows.known_rows import digests_of
from threefold.errors import DataError
from threefold.mesh.mesh import Mesh
from threefold.model import load, noise
from threefold.model.build import ParallelModel
from threefold.run.folder import RunFolder
from threefold.run.sources import with_glob


@dataclass
class Checkpointer:
    """Saves and resumes the state of a run. Every rank has one and calls it in the same way."""

    config: Config
    folder: RunFolder
    mesh: Mesh
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    loader: TokenLoader
    architecture: PretrainedConfig

    def __post_init__(self) -> None:
        self._best: float | None = self.mesh.share("best", self._best_before)
        self.changed: list[Change] = []  # keys that are not as they were when the checkpoint was saved
        self.saver: Saver  # made by `start`, as the next
        self._held: list[run_state.Holding]
        # Adapters only work with the base weights they were trained on.
        adapted = bool(self.config.model.lora.r)
        self._base = self.mesh.once_per_host("base", lambda: load.fingerprint(self.config.model)) if adapted else None

    def _best_before(self) -> float | None:
        """The best evaluation loss of the steps that the run resumes after."""
        best, resume = self.folder.checkpoints.best(), self.folder.resume
        return best[1] if best is not None and resume is not None and best[0] <= resume.step else None

    def start(self) -> None:
        """Prepares to save; call this when the state is the one that training begins with."""
        asked, state = self.config.checkpoint, run_state.state_of(self.model.module, self.optimizer)
        self._held = run_state.holdings(state, self.mesh)
        # Only the last state is saved: no steps would run in parallel, so a copy would waste memory.
        once = not asked.every and not (self.config.eval.source and self.config.eval.every)
        self.saver = Saver(
            self.mesh,
            self._parts,
            background=asked.mode == "async" and not once,
            continue_on_error=asked.on_error == "continue",
        )

    def save(self, step: int, eval_loss: float | None, due: bool) -> None:
        """Saves after `step` if a save is due or the evaluation loss is the best so far; every rank calls it.

        Raises:
            RunError: the previous save, or this one, failed.
        """
        best = None
        if eval_loss is not None and math.isfinite(eval_loss) and (self._best is None or eval_loss < self._best):
            best = eval_loss
        if not due and best is None:
            return
        asked, checkpoints, manifest = self.config.checkpoint, self.folder.checkpoints, self._manifest()

        def commit(seals: Mapping[str, Seal]) -> None:
            for record in (self.folder.metrics, self.folder.path / audit_record.FILE):
                if record.exists():
                    sync(record)  # after a power cut, no checkpoint is there whose steps have no record
            checkpoints.commit(step, manifest, {f"state/{name}": seal for name, seal in seals.items()})
            if best is not None:
                checkpoints.mark_best(step, best)
            checkpoints.prune(asked.keep, keep_every=asked.keep_every)
            self.folder.journal.note("save", step=step, start=self.folder.start)

        state = checkpoints.partial(step) / "state"
        begin, abandon = partial(checkpoints.begin, step), partial(checkpoints.abandon, step)
        self.saver.save(Job(step, state, begin, commit, abandon))
        if best is not None:
            self._best = best

    def _parts(self) -> list[Part]:
        state = run_state.state_of(self.model.module, self.optimizer)
        return run_state.parts(state, self._held, self.mesh)

    def _manifest(self) -> dict[str, Any]:
        return {
            "run": self.folder.run,
            "start": self.folder.start,
            "mesh": list(self.mesh.topology.sizes),
            "device": self.mesh.device.type,
            "data": self.loader.state_dict(),
            "blocks": digests_of(self.loader.rows),
            "seed": self.config.train.seed,
            "architecture": architecture_of(self.architecture),
            "config": with_absolute_paths(self.config).model_dump(mode="json"),
            "base": self._base,
            "admission": self.config.model.admission,
            "versions": versions(),
        }

    def resume(self) -> None:
        """Reads the checkpoint that the run folder found, if there is one.

        Raises:
            CheckpointError: it belongs to another model or seed, or a change must be confirmed.
            DataError: it belongs to other data or another order.
        """
        checkpoint = self.folder.resume
        if checkpoint is None:
            return
        manifest = read_manifest(checkpoint)
        refuse_other(manifest, self.config, self.architecture, checkpoint)
        self.changed = changes(manifest, self.config)
        if self.folder.origin is None and not self.folder.accepts_changes:
            refuse_unconfirmed(self.changed, checkpoint)
        if self.config.model.lora.r:
            refuse_other_base(manifest, self._base, self.config, checkpoint)
        try:
            self.loader.load_state_dict(manifest["data"])
        except DataError as error:
            raise with_glob(error, self.config) from error
        index = Index.read(checkpoint.state)
        state = run_state.state_of(self.model.module, self.optimizer)
        run_state.fit(state, index)
        run_state.read_into(state, checkpoint.state, index, self.mesh)
        if tuple(manifest["mesh"]) == self.mesh.topology.sizes:
            run_state.restore_random_state(checkpoint.state, index, self.mesh)
        else:
            # The saved random states do not apply to another mesh, and those of step 1 must not repeat either.
            place = noise.places(self.mesh, self.model.tensor.sequence_group)
            seed = seed_of("a resume on another mesh", self.config.train.seed, checkpoint.step, *place)
            torch.manual_seed(seed)
        # Until every rank has read the checkpoint, no rank may start anything that could remove it.
        self.mesh.decide("resumed", "", lambda parts: "")


def rate_of(config: Config, folder: RunFolder) -> tuple[float, str]:
    """Returns the run's peak learning rate, and the reason: `auto` is the rate that a resumed run began with."""
    if config.optimizer.lr == "auto" and folder.resume is not None:
        before = read_manifest(folder.resume)["config"].get("optimizer", {}).get("lr")
        if isinstance(before, float):
            return before, "the run began with it"
    return peak_rate(config)


def with_former(config: Config, folder: RunFolder) -> Config:
    """Returns the config with the keys of the order and of the labels as the resumed run has them, unless given.

    The configs of version 0.1.0 do not name them: it knew only these.
    """
    if folder.resume is None:
        return config
    before, given = read_manifest(folder.resume)["config"].get("data", {}), config.data.model_fields_set
    update = {name: before.get(name, former) for name, former in FORMER.items() if name not in given}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def versions() -> dict[str, str]:
    """Returns the versions that a run's results depend on."""
    return {
        "threefold": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def undamaged(folder: RunFolder, mesh: Mesh) -> RunFolder:
    """Returns the run folder with its newest undamaged checkpoint; every rank calls it.

    The reason for skipping a checkpoint is printed once.

    Raises:
        CheckpointError: the requested checkpoint is damaged, or all are.
    """
    chosen, passed = newest_undamaged(folder.candidates, lambda each: run_state.damage_found(each, mesh))
    resuming = folder.resuming(chosen, passed)
    for checkpoint, reason in passed:
        if mesh.rank == 0:
            print(f"skipped {checkpoint.path}: {reason}", file=sys.stderr)
    return resuming
