"""Saves and resumes a run: its checkpoints, on the side of the ranks.

A checkpoint is loaded only after its sizes and checksums were compared (the ranks share the files) and after it is
known to belong to this run. Until then, nothing in the run's folder changes.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from threefold.checkpoint import chat_template
from threefold.checkpoint import state as run_state
from threefold.checkpoint.background_saver import Saver
from threefold.checkpoint.checkpoint_folder import Checkpoint, newest_undamaged
from threefold.checkpoint.copies import refuse_drift, state_held
from threefold.checkpoint.manifest import (
    ChangedKey,
    changes,
    lost_bits,
    manifest_of,
    read_manifest,
    refuse_other,
    refuse_other_base,
    refuse_other_code,
    refuse_other_user_objects,
    refuse_unconfirmed,
    versions,
    with_axes,
)
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import TensorPart
from threefold.config.schema import Config
from threefold.config.yaml_text import to_set
from threefold.data.rows.known_rows import digests_of
from threefold.data.sampling.loader import TokenLoader
from threefold.data.text.listing import FILE
from threefold.errors import CheckpointError, DataError, Problem, shell_word
from threefold.jsonl import Lines, Values
from threefold.mesh.mesh import Mesh
from threefold.model import load
from threefold.model.model import Model
from threefold.optim.build import begin_state
from threefold.optim.ema import Ema
from threefold.run.folder import RunFolder
from threefold.training.step import TrainStep

_MOST_NAMED = 10  # changes of the data, in an error


@dataclass
class Checkpointer:
    """Saves and resumes the state of a run. Every rank has one and calls it in the same way."""

    config: Config
    folder: RunFolder
    mesh: Mesh
    model: Model
    optimizer: torch.optim.Optimizer
    loader: TokenLoader
    architecture: PretrainedConfig
    template: str | None = None
    """the text of the chat template in use; None: there are no conversations."""
    user_objects: Values = field(default_factory=dict)
    """names of a program's objects that change the results."""
    ema: Ema | None = None
    evaluation: str | None = None
    """the fingerprint of the evaluated rows, if there are some."""

    def __post_init__(self) -> None:
        self._best, self.evaluation = self.mesh.share("best", self._best_before)
        # Keys that are not as they were when the checkpoint was saved.
        self.changed: list[ChangedKey] = []
        # Why an exact run continues with other bits; None: it does not resume.
        self.lost_bits: list[str] | None = None
        self._last = self.folder.done  # the step of the last save, or of the resume
        # Called when a save is over, before the next, which may remove what it saved.
        self.on_saved: Callable[[Checkpoint], None] = lambda checkpoint: None
        self.saver: Saver  # made by `start`
        self._base = load.base_of(self.config, self.mesh)
        self._code = load.own_code(self.model.module)
        # Of each save: what does not change while the run trains.
        self._manifest = {
            **manifest_of(self.config, self.architecture, self.mesh, self._base, self._code),
            "data": {},
            "blocks": digests_of(self.loader.rows),
            "evaluation": self.evaluation,
            chat_template.KEY: chat_template.digest_of(self.template),
            "admission": self.config.model.admission,
            "given": dict(self.user_objects),
        }

    def _best_before(self) -> tuple[float, str | None]:
        """The best loss of the steps that the run resumes after, on the rows evaluated now; and the last such rows."""
        best, resume = self.folder.checkpoints.best(), self.folder.resume
        if resume is None:
            return math.inf, self.evaluation
        rows = read_manifest(resume).get("evaluation")
        now = self.evaluation or rows
        if best is None or best[0] > resume.step or rows not in (now, None):
            return math.inf, now
        return best[1], now

    def start(self, step: TrainStep) -> None:
        """Prepares to save beside these steps; call this when the state is the one that training begins with."""
        self.saver = Saver(
            self.mesh,
            self._parts,
            background=self.config.saves_between,
            continue_on_error=self.config.checkpoint.on_error == "continue",
            in_forward=[f"model.{name}" for name, _ in self.model.module.named_buffers()],
        )
        self.saver.saved_step = self.folder.done
        step.before_update = self.saver.before_update

    def save(self, step: int, eval_loss: float | None, due: bool) -> None:
        """Saves after `step` if a save is due or the evaluation loss is the best so far; every rank calls it.

        A step that is saved already becomes the best, when its save has ended.

        Raises:
            RunError: the previous save, or this one, failed.
        """
        best = None
        if eval_loss is not None and math.isfinite(eval_loss) and eval_loss < self._best:
            self._best = best = eval_loss
        if step == self._last and best is not None:
            self.saver.wait()
            if self.saver.saved_step == step:
                self.mesh.share("the best", partial(self._mark_best, step, best))
        if step == self._last or (best is None and not due):
            return
        self._last = step
        copies = state_held(self.model.module, self.optimizer) | (
            self.ema.state() if self.ema is not None else {}
        )
        refuse_drift(copies, self.mesh, when=f"after step {step}, which is not saved")
        manifest = self._manifest | {"data": self.loader.state_dict()}
        keep = self.config.checkpoint.keep
        job = self.folder.save_of(step, manifest, keep=keep, best=best)
        self.saver.wait()
        self.report_saved()
        self.saver.save(job)

    def report_saved(self) -> None:
        """Calls `on_saved` with the newest complete checkpoint of this run, if there is one."""
        if (step := self.saver.saved_step) > self.folder.done:
            self.on_saved(self.folder.checkpoints.at(step))

    def _mark_best(self, step: int, eval_loss: float) -> None:
        self.folder.checkpoints.mark_best(step, eval_loss)
        self.folder.prune(self.config.checkpoint.keep)

    def _parts(self) -> list[TensorPart]:
        # Some optimizers make their state in the first step, and of parameters without a gradient none.
        state = run_state.state_of(self.model.module, self.optimizer)
        state |= self.ema.state() if self.ema is not None else {}
        return run_state.parts(state, run_state.holdings(state, self.mesh), self.mesh)

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
        if "loop" in manifest and not manifest["data"]:
            raise CheckpointError(
                f"{checkpoint.path} was saved by a custom loop, without its position in the data",
                expected="what was read until then: the run would start again from the first rows",
                fix=f"threefold export {shell_word(checkpoint.path)} --to MODEL, and a new run with "
                "--model.name_or_path MODEL",
            )
        if not self.folder.accepts_changes:
            refuse_other_user_objects(manifest, self.user_objects, checkpoint)
            refuse_other_code(manifest, self._code, self.config, checkpoint)
        chat_template.refuse_other(manifest, self.template, self.config, checkpoint)
        self.changed = changes(manifest, self.config)
        # What was imported has no bits to keep.
        exact = self.config.train.exact and manifest["mesh"] != []
        if exact:
            self.changed = with_axes(self.changed, manifest, self.mesh.topology)
            self.lost_bits = lost_bits(manifest, self.changed, versions())
        if self.folder.origin is None and not self.folder.accepts_changes:
            refuse_unconfirmed(self.changed, checkpoint, exact=exact)
        refuse_other_base(manifest, self._base, self.config, checkpoint)
        if manifest["data"]:  # what another program has read of its data is not known here
            try:
                self.loader.load_state_dict(manifest["data"])
            except DataError as error:
                same_rows = self.loader.rows.fingerprint in str(manifest["data"])
                other = [] if same_rows else [*self._other_data(checkpoint)]
                if more := len(other[_MOST_NAMED:]):
                    what = f"{more:,} other files of the data have changed too"
                    other[_MOST_NAMED:] = [Problem(what, "as they were", "restore them")]
                raise DataError.of([*other, *error.problems]) from error
        index = Index.read(checkpoint.state)
        begin_state(self.model.module, self.optimizer, index)
        averages = self.ema.resume(index.entries) if self.ema is not None else {}
        state = run_state.state_of(self.model.module, self.optimizer, index.entries) | averages
        run_state.fit(state, index)
        run_state.read_into(state, checkpoint.state, index, self.mesh)
        if self.ema is not None and not averages:
            self.ema.begin()
        run_state.restore_or_draw_random(checkpoint, manifest, index, self.model)

    def _other_data(self, checkpoint: Checkpoint) -> Iterator[Problem]:
        """The keys and files of the data that have changed: of the data itself the order knows a digest alone."""
        expected = "what the run began with"
        for change in self.changed:
            if change.key.startswith("data."):
                yield to_set(
                    f"{change} since {checkpoint.path}", expected, change.key, change.before
                )
        for line in Lines(checkpoint.path.parents[1] / FILE).read():
            path, size = Path(str(line.values.get("path"))), line.values.get("bytes")
            if path.is_absolute() and not path.exists():
                yield Problem(f"{path} is gone", expected, "restore it")
            elif isinstance(size, int) and path.is_file() and path.stat().st_size != size:
                yield Problem(f"{path} no longer has {size:,} bytes", expected, "restore it")


def rate_of(config: Config, folder: RunFolder) -> tuple[float, str]:
    """Returns the run's peak learning rate, and the reason: `auto` is the rate that a resumed run began with."""
    if config.optimizer.lr == "auto" and folder.resume is not None:
        before = read_manifest(folder.resume)["config"].get("optimizer", {}).get("lr")
        if isinstance(before, float):
            return before, "the run began with it"
    return config.peak_rate


def undamaged(folder: RunFolder, mesh: Mesh) -> RunFolder:
    """Returns the run folder with its newest undamaged checkpoint; every rank calls it.

    The reason for skipping a checkpoint is printed once.

    Raises:
        CheckpointError: the requested checkpoint is damaged, or all are.
    """
    chosen, passed = newest_undamaged(
        folder.candidates, lambda each: run_state.damage_found(each, mesh)
    )
    resuming = folder.resuming(chosen, passed)
    for checkpoint, reason in passed:
        if mesh.rank == 0:
            print(f"skipped {checkpoint.path}: {reason}", file=sys.stderr)
    return resuming
