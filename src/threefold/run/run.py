"""A run, used by `threefold train` and by programs with a custom loop: one object with every guarantee.

In: a folder, a mesh, and the config keys that concern a run. Out: a folder that one process at a time writes, whose
checkpoints, journal and records belong to one chain of starts. Invariants: nothing in a run is changed before the
request is accepted (`begin`); the rows that the ranks have read are compared before anything is saved; a signal to any
rank, or a non-finite number, ends all of them after the same step; a stalled rank is named.

The command builds model and data from a config and steps in `training.loop`; a program calls `load`, `steps`, `log`,
`save`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch.distributed as dist

from threefold.audit import compare, record
from threefold.audit.compare import Audit
from threefold.audit.offences import explain
from threefold.audit.record import SegmentLine
from threefold.checkpoint.lineage import Author
from threefold.checkpoint.lock import RunLock, Words
from threefold.checkpoint.manifest import versions
from threefold.config import loading
from threefold.config.schema import Config
from threefold.data.order.order import Order, Place
from threefold.errors import (
    EXIT_STOPPED_WITH_CHECKPOINT,
    CheckpointError,
    ConfigError,
    DataError,
    RunError,
    check_argument,
    in_program,
    shell_word,
)
from threefold.integrations import trackers
from threefold.jsonl import MetricsFile, Tracker, Values
from threefold.mesh import environment
from threefold.mesh.exchange import digest_of_rows
from threefold.mesh.mesh import Mesh, active_mesh, init_mesh
from threefold.optim.build import rates_of
from threefold.run.checkpointer import undamaged
from threefold.run.failure import note_error
from threefold.run.folder import RunFolder, log_to_file, new_path, open_run, require_shared
from threefold.run.watch.stall import CLOSING
from threefold.run.watch.watchdog import Watchdog
from threefold.training.lag import Lag, Slowest
from threefold.training.loop import Guards, Window
from threefold.training.nonfinite import Finite, Policy
from threefold.training.numbers import StepNumbers, StepResult
from threefold.training.progress import OwnTime
from threefold.training.step import TrainStep
from threefold.training.stop_request import StopRequest

if TYPE_CHECKING:
    from threefold.checkpoint.background_saver import Saver
    from threefold.run.stored import StoredRun
    from threefold.training.evaluation import EvalNumbers
    from threefold.training.saving import Held, Loaded

log = logging.getLogger("threefold")

# The watchdog must report before the collectives' own limit, which would end the run with a bare timeout.
REPORT_BEFORE = 0.9
# A running save may finish before a failed run ends.
LINGER_S = 60.0
# Config keys that a program may set for its run; it does the rest in its own code.
_KEYS = (
    "log.trackers",
    "log.project",
    "log.stall_s",
    "audit.every",
    "train.nonfinite",
    "train.timeout_s",
    "checkpoint.keep",
    "checkpoint.on_error",
    "checkpoint.resume",
    "checkpoint.store",
)


class Run:
    """An open run folder, and everything that guards the steps made in it.

    Attributes:
        folder: its path, and the checkpoint that it resumes from; set inside `with`.
        step: the last step done (0: none).
        extra: plain values, the same on every rank, that are saved in each checkpoint and restored by `load`.
        guards: checks around the steps, from `begin` on.
        watch: names the rank that the others wait for.
        say: prints a line, on rank 0.
        warn: prints a warning, on rank 0.
    """

    folder: RunFolder
    guards: Guards

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        mesh: Mesh | None = None,
        config: Values | Config | None = None,
        watch: Watchdog | None = None,
        last: bool = False,
    ) -> None:
        """Every rank creates it and enters it.

        Args:
            folder: a folder that all ranks see; None: a new one, runs/TIME.
            mesh: None: the mesh of the last `init_mesh`.
            config: values by key, as for the command: log.trackers, log.project, log.stall_s, audit.every,
                train.nonfinite, train.timeout_s, checkpoint.keep, checkpoint.on_error, checkpoint.store, and
                checkpoint.resume: the path or the address of a checkpoint to go back to. A whole Config: the
                request of `threefold train`.
            watch: a watch that is already open; None: the run opens one.
            last: the process ends after the run.

        Raises:
            ConfigError: a key is unknown, or has no effect on a program's run.
        """
        self._program = not isinstance(config, Config)
        for name, value, kinds, fix in (
            ("folder", folder, str | Path | None, "'runs/my-run'"),
            ("mesh", mesh, Mesh | None, "threefold.init_mesh()"),
            ("config", config, Mapping | Config | None, "{'log.stall_s': 300}"),
        ):
            check_argument(
                name,
                value,
                isinstance(value, kinds) and value != "",
                expected=f"the {name} of a run, or None",
                fix=f"{name}={fix}",
            )
        with self._in_own_words():
            self.config = (
                config if isinstance(config, Config) else _config_of(config or {}, folder)
            )
        self.mesh = mesh or active_mesh() or init_mesh()
        self._own_watch, self._last = watch is None, last
        timeout_s = self.config.train.timeout_s or REPORT_BEFORE * self.mesh.timeout_s
        self.watch = watch or Watchdog(
            self.mesh.rank, stall_s=self.config.log.stall_s, timeout_s=timeout_s, program=True
        )
        self._slowest = Slowest(self.mesh, notice=self._late)
        self.say: Callable[[str], None] = print if self.mesh.rank == 0 else lambda line: None
        self.warn: Callable[[str], None] = self.say
        self.step, self.extra = 0, dict[str, Any]()
        self._lock, self._stack = RunLock(), contextlib.ExitStack()
        self._held: Held | None = None
        self._stateful: Values = {}
        self._passes = dict[int, Iterator[Any]]()
        self._saved = -1
        self._began = False
        # None: not entered yet; then the process that may use it, and 0 after the end.
        self._open: int | None = None
        self._window = Window()
        self._trained: bool | None = None  # in this step; None: outside of one
        self._stopping = False
        self._rows, self._rates = list[int](), dict[str, float]()
        self._start: Callable[[], None] | None = None
        self.stored: StoredRun | None = None  # its copy in a store, if there is one

    def __enter__(self) -> Self:
        """Locks the folder and finds the newest undamaged checkpoint; nothing of an existing run is changed.

        Raises:
            ConfigError: it is not a run's, in use, or not writable. CheckpointError: all checkpoints are damaged.
        """
        if self._open is not None:
            raise ConfigError(
                "a Run is entered twice",
                expected="one `with` for each Run, which guards it until the block ends",
                fix="with threefold.Run(folder) as run: a new Run continues in the same folder",
            )
        with contextlib.ExitStack() as stack, self._in_own_words():
            if self._own_watch:
                self._watch(stack)
            stack.enter_context(self._lock)
            self.watch.progress.enter("opening the run")
            asked = self.config.checkpoint
            if asked.store is not None or "://" in asked.resume:
                self._open_stored(stack)
            # Opening the store has locked the folder.
            lock = self._lock if not self._lock.held else None
            opened = partial(open_run, self.config, lock, program=self._program)
            folder = RunFolder.from_values(self.mesh.share("run", lambda: opened().to_values()))
            require_shared(folder.path, self.mesh, Words(self._program))
            end = log_to_file(folder.path, self.mesh.rank)
            if self._program:
                stack.callback(end)
            self.folder = undamaged(folder, self.mesh)
            if self.stored is not None:
                self.folder = dataclasses.replace(self.folder, mirror=self.stored.mirror)
            self.watch.folder = folder.path
            if self.stored is not None:
                self.stored.send_if_missing(self.folder)
            self._stack = stack.pop_all()
        self._open = os.getpid()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the run: waits for pending saves; a program's loop is saved after its last step.

        Raises:
            SystemExit: 75, after a stop signal, when the state is saved.
        """
        stopped = False
        if self._open != os.getpid():
            return  # a forked child
        try:
            if self._program and error is not None:
                self._failed(error)
            elif self._program:
                with self._in_own_words():
                    stopped = self._end_of_program()
                self.watch.leave()
        except BaseException as raised:
            kind, error, trace = type(raised), raised, raised.__traceback__
            raise
        finally:
            self._open = 0
            self._stack.__exit__(kind, error, trace)
        if stopped:
            self.mesh.close()
            raise SystemExit(EXIT_STOPPED_WITH_CHECKPOINT)

    def begin(
        self,
        start: Callable[[], SegmentLine | None],
        facts: Callable[[], Values],
        **audited: Any,
    ) -> None:
        """Accepts the request, after the last check that could refuse it: from now on this start owns the folder.

        Checkpoints later than the one loaded are set aside. Every rank calls it, before the first step.

        Args:
            start: where the coming steps begin in the order of rows; called once this start owns the folder. None:
                the steps are not audited.
            facts: facts about this start, for the journal; on rank 0.
            audited: further arguments of the audit.

        Raises:
            RunError: the data do not continue where the run's record ends.
        """
        mesh = self.mesh
        # Until the end, so that no signal can interrupt a save.
        stop = self._stack.enter_context(StopRequest(mesh, last=self._last))
        # The starter of several ranks stops waiting; with a single rank, nothing else would end a wait for data.
        self.watch.overdue = partial(stop.overdue, self.config.checkpoint.grace_s)
        mesh.share("identity", lambda: self.folder.claim().id)
        audit = self._audit(line, **audited) if (line := start()) is not None else None
        if audit is None:
            mesh.share("start", self._link)
        info = environment.current()
        resumed = self.folder.resumed_from and str(Path(self.folder.resumed_from).resolve())
        origin = {
            "from": resumed,
            "mesh": mesh.topology.sizes,
            "restart": info.restart,
            "host": info.host,
        }
        accepted = mesh.share(
            "accept",
            lambda: self.folder.accept(self.config, facts={**origin, **versions(), **facts()}),
        )
        self.folder = dataclasses.replace(self.folder, author=Author(**accepted["author"]))
        if (stored := self.stored) is not None:
            mesh.share("stored start", lambda: stored.begun(self.folder))
        for path in accepted["aside"]:
            self.say(f"  set aside: {path}, later than the step that the run resumes from")
        self._lock.keep()
        policy = Policy(
            self.config.train.nonfinite == "skip",
            shell_word(self.folder.path),
            program=self._program,
        )
        self.guards = Guards(
            stop, Finite(mesh, policy), audit, progress=self.watch.progress, late=self._late
        )
        self._stack.callback(self.guards.close)

    def track(
        self, values: Values, facts: Values, *, shown: Iterable[Tracker] = ()
    ) -> list[Tracker]:
        """All receivers of the metrics, on rank 0: the run's file, the display, and the configured trackers."""
        if self.mesh.rank != 0:
            return []
        for name in self.config.log.trackers[:1]:  # a library may wait long for its server
            self.watch.progress.enter(f"opening tracker {name}")
        go_on = self.config.checkpoint.on_error == "continue"
        described = trackers.RunDescription(
            self.folder.path, self.config.log.project, values, facts, self.folder.done + 1
        )
        return [
            MetricsFile(self.folder.metrics, continue_on_error=go_on, timed=True),
            *shown,
            *trackers.open_trackers(self.config.log.trackers, described, self.say),
        ]

    def ended(self, step: int, *, stopped: bool, saved: int, **more: bool) -> None:
        """Notes the end in the journal, and the last step that has a checkpoint."""
        if self.mesh.rank == 0 and self.folder.author is not None:
            event, by = ("stop", {"by": self.guards.stop.by}) if stopped else ("done", {})
            self.folder.journal.note(
                event, step=step, saved=saved, start=self.folder.author.start, **by, **more
            )

    def load(self, step: TrainStep, loader: Any = None, **stateful: Any) -> Loaded | None:
        """Registers the objects to train, and loads the checkpoint that the run resumes from; every rank calls it once.

        Args:
            step: its model and optimizer are saved by the run.
            loader: has a `state_dict()` of plain values, the same on every rank: a loader of `threefold.distribute`.
            stateful: by name, other objects with a `state_dict()` of plain values and `load_state_dict()`: a scheduler.

        Returns:
            None for a new run.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer. DataError: of other data.
        """
        from threefold.training import saving

        check_argument(
            "step",
            step,
            isinstance(step, TrainStep),
            expected="the TrainStep that the program calls",
            fix="run.load(threefold.TrainStep(model), loader)",
        )
        for name, each in {"loader": loader, **stateful}.items():
            saving.check_stateful(name, each)
        self._require_open("run.load(...)")
        if self._held is not None:
            raise ConfigError(
                "run.load(...) is called twice",
                expected="once: a run saves one step and one loader, and the first would no longer be saved",
                fix="run.load(step, loader) with all that the run saves",
            )
        self.mesh.kept[step.model] = step.optimizer
        self._stack.callback(self.mesh.kept.pop, step.model, None)
        self._held = saving.Held(step.model, step, loader)
        self._stateful = stateful
        step.progress, step.after = self.watch.progress, partial(self._computed, step)
        if self.folder.resume is None:
            return None
        with self._in_own_words():
            loaded = saving.read(self.folder.resume, self._held)
            if missing := sorted(stateful.keys() - loaded.extra.keys()):
                raise CheckpointError(
                    f"{self.folder.resume.path} has no state of {missing[0]}",
                    expected="state that the run has saved",
                    fix=f"run.load(...) without {missing[0]}=, which starts it afresh; pass it at the next start",
                )
        self.extra = {
            name: value for name, value in loaded.extra.items() if name not in stateful
        }
        for name, each in stateful.items():
            each.load_state_dict(loaded.extra[name])
            # Parameters are also grouped by their mesh.
            for schedule in (each, *getattr(each, "_schedulers", ())):
                groups = (
                    schedule.optimizer.param_groups if hasattr(schedule, "base_lrs") else []
                )
                if groups and len(schedule.base_lrs) != len(groups):
                    schedule.base_lrs = [group["initial_lr"] for group in groups]
        self.step = self._saved = loaded.step
        return loaded

    def steps(
        self, batches: Iterable[Any], *, until: int | None = None, save_every: int = 0
    ) -> Iterator[Any]:
        """Yields the batches of the remaining steps, one per step, on every rank; `step` is the step's number.

        The rows of a loader of `threefold.distribute` are audited. After a stop signal to any rank the state is saved
        and the iteration ends.

        Args:
            batches: read again from the beginning when it ends, up to the last step; passed again with another
                `until`, it continues where it was.
            until: the number of the last step; None: `batches` is read once.
            save_every: steps between checkpoints; 0: only at the end, and when the program calls `save`.

        Raises:
            ConfigError: `load` was not called, or not with this loader. DataError: `batches` is empty.
        """
        check_argument(
            "until",
            until,
            isinstance(until, int | None),
            expected="the number of the last step",
            fix="until=1000",
        )
        self._require_open("run.steps(...)")
        with self._in_own_words():
            self._refuse_batches(batches)
        self._start = partial(self._begin, batches)
        if until is not None and self.step >= until:
            return  # nothing in a finished run is changed
        self._require_begun("run.steps()")
        passes = self._passes.setdefault(id(batches), _passes(batches, self))
        if until is None:
            passes = iter(batches)
        self._window = Window(own=OwnTime(self.guards.progress))
        while (until is None or self.step < until) and not self._stopping:
            self.guards.progress.enter("data", step=self.step + 1)
            try:
                batch = self._window.read(passes)
            except StopIteration:
                return
            except BaseException:
                # The iterator is over: read again it would be empty, and the run would end before `until`.
                del self._passes[id(batches)]
                raise
            self.step, self._trained = self.step + 1, False
            self._window.steps += 1
            self._rows = self.guards.progress.rows = list(getattr(batches, "indices", ()))
            if self.guards.audit is not None:
                self.guards.audit.observe(
                    self.step, np.array(self._rows, np.int64), *_contents(batch)
                )
            yield batch
            with self._in_own_words():
                self._complete(due=bool(save_every) and self.step % save_every == 0)

    def log(self, numbers: StepNumbers | EvalNumbers | None = None, **values: Any) -> None:
        """Logs to the run's metrics and trackers: the result of a step or an evaluation, and further numbers."""
        from threefold.training.evaluation import EvalNumbers

        self._require_begun("run.log()")
        check_argument(
            "numbers",
            numbers,
            isinstance(numbers, StepNumbers | EvalNumbers | None),
            expected="what a step or an evaluation returned; other numbers need names",
            fix="run.log(numbers, accuracy=0.5)",
        )
        metrics: dict[str, Any] = {"step": self.step}
        if isinstance(numbers, StepNumbers):
            metrics |= {
                **numbers._asdict(),
                **self._rates,
                **self._window.measured(self.step, self.mesh, self._slowest),
            }
            self._window = Window(own=OwnTime(self.guards.progress))
            if self.config.train.nonfinite == "skip":
                metrics["skipped_steps"] = self.guards.finite.skipped
        elif numbers is not None:
            metrics |= {"eval_loss": numbers.loss, "eval_count": numbers.num_counted}
        for name, each in values.items():
            number = each
            # A tensor with one element counts as a number, on every rank alike.
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                number = each.item()
            check_argument(
                name,
                each,
                isinstance(number, int | float) and name not in metrics,
                expected="a number, under a name that the run does not use itself",
                fix=f"run.log(numbers, my_{name}=0.5)",
            )
            metrics[name] = number
        self.guards.tell(metrics)

    def save(self) -> None:
        """Saves the state after `step`, once, in the background; every rank calls it.

        Raises:
            RunError: the ranks did not read the rows that they should have, or an earlier save failed.
        """
        from threefold.training import saving

        if self._start is not None and self._saved == self.step:
            return
        self._require_begun("run.save()")
        assert self._held is not None
        with self._in_own_words():
            self.mesh.agree("run.save() after step", self.step)
            self.guards.prove(self.step, saving=True)
            self.guards.progress.enter("save")
            states = {name: each.state_dict() for name, each in self._stateful.items()}
            asked = self.config.checkpoint
            saving.write(
                self._held,
                self.step,
                partial(self.folder.save_of, self.step, keep=asked.keep),
                extra={**self.extra, **states},
                on_error=asked.on_error,
            )
        self._saved = self.step

    def _open_stored(self, stack: contextlib.ExitStack) -> None:
        # A run on local disk alone loads none of this.
        from threefold.places.restore import beating
        from threefold.run.stored import open_stored

        with beating(self.watch.progress.tick):
            opened = open_stored(
                self.config, self.mesh, self._lock, program=self._program, say=self.say
            )
        self.config, self.stored = opened
        if self.stored is not None:
            stack.callback(self.stored.close)

    def _watch(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self.watch)
        self.watch.mesh = self.mesh
        if (store := self.mesh.store) is not None:
            # A mesh may serve several runs in turn.
            hosts = self.mesh.decide("hosts", self.mesh.host, list)
            number = self.mesh.share("watch", lambda: store.add("threefold/watches", 1))
            self.watch.begin(dist.PrefixStore(f"run-{number}", store), hosts)

    def _computed(self, step: TrainStep, result: StepResult) -> None:
        """What the step has computed, not yet relied on by anything, and the learning rates that it used."""
        if self._start is not None and self._trained is None:
            raise ConfigError(
                "step(batch) outside of run.steps(...)",
                expected="steps inside run.steps, which counts them and proves what they read",
                fix="for batch in run.steps(loader, until=...): step(batch)",
            )
        self._require_begun("step(batch)")
        self._trained = True
        self._slowest.tell(self._window.own)
        first = step.optimizer.param_groups[0]
        self._rates = {
            "lr": first["lr"] / first.get("lr_share", 1.0),
            **rates_of(step.optimizer),
        }
        rows = [self._rows] * len(result.micro_losses)
        self.guards.look_for_nonfinite(self.step, result, lambda: rows, now=True)
        self.guards.progress.enter("the program")

    def _late(self, lag: Lag) -> None:
        self.folder.journal.note("lag", **dataclasses.asdict(lag), text=lag.text())
        self.warn(lag.text())

    def _refuse_batches(self, batches: Any) -> None:
        """ConfigError for batches that the run cannot continue with."""
        if self._held is None:
            raise ConfigError(
                "run.steps(...) before run.load(...)",
                expected="run.load first: it says what the run saves, and resumes if the folder has a checkpoint",
                fix="run.load(step, loader), inside of `with threefold.Run(...) as run:`",
            )
        if hasattr(batches, "state_dict") and batches is not self._held.loader:
            raise ConfigError(
                f"run.steps(...) is given a {type(batches).__name__} that run.load(...) was not",
                expected="the loader whose position the run saves: a resume would read its first rows again",
                fix="run.load(step, loader)",
            )
        if (
            self.step
            and not self._began
            and not hasattr(batches, "state_dict")
            and not hasattr(batches, "__next__")
        ):
            kind = type(batches).__name__
            raise ConfigError(
                f"the run resumes after step {self.step}, but run.steps(...) is given {kind}, which starts over",
                expected="batches that continue: the first ones would be read again, and the last ones never",
                fix="run.steps(itertools.islice(itertools.cycle(batches), run.step, None), until=...); or a loader of "
                "threefold.distribute, with run.load(step, loader)",
            )

    def _begin(self, batches: Any) -> None:
        """Begins the run of a program, with the audit of its first loader."""
        order, why, fix = _order_of(batches)
        self.mesh.agree(f"run.steps() over {order or why}")
        if hasattr(batches, "refuse_other_dataset"):
            batches.refuse_other_dataset(self.mesh)
        self._began = True
        what = {"program": sys.argv[0], "audit": why or "on", "audit_fix": fix}
        self.begin(
            lambda: None if order is None else self._start_of(batches, order), lambda: what
        )
        if why:
            self.say(f"not audited: {why}; {fix}")
        assert self._held is not None
        # torch marks the step of an optimizer whose rate a scheduler sets.
        scheduled = hasattr(self.mesh.kept[self._held.model].step, "_wrapped_by_lr_sched")
        if scheduled and not (self._stateful or self.extra):
            self.say(
                "not saved: the optimizer's scheduler, which would start over after a stop; "
                "run.load(step, loader, schedule=schedule)"
            )
        self.guards.trackers = self.track(
            {"program": what}, {"mesh": str(self.mesh.topology), **versions()}
        )
        self.guards.notice = self._notice

    def _notice(self, step: int) -> None:
        for saver in self._savers():
            saver.check(step)

    def _savers(self) -> list[Saver]:
        return [*self._held.model.savers.values()] if self._held is not None else []

    def _link(self) -> str:
        return self.folder.begin().link

    def _audit(self, start: SegmentLine, **audited: Any) -> Audit:
        """Opens the audit of the coming steps, which appends to the run's record: the start begins with it."""
        mesh = self.mesh
        path = self.folder.path / record.FILE
        go_on = self.config.checkpoint.on_error == "continue"
        file = MetricsFile(path, continue_on_error=go_on) if mesh.rank == 0 else None
        resume = f"threefold resume {shell_word(self.folder.path)}"
        older = f"resume from an older checkpoint: {resume}/checkpoints/step-..."
        if self._program:
            resume = "run the program again"
            older = Words(self._program).resume(f"{self.folder.path}/checkpoints/step-...")
            older = f"go back to an older checkpoint: {older}"
        begin = partial(compare.begin, start, path, file, link=self._link, fix=older)
        start = dataclasses.replace(start, **mesh.share("audit", begin))
        return Audit(
            start,
            gather=mesh.gather,
            explain=partial(explain, resume=resume),
            record=file,
            **audited,
        )

    def _refuse_moved(self, recorded: Place, order: Order) -> None:
        """RunError if the next start would not continue where this one is, and so would be refused."""
        assert self._held is not None
        state = self._held.loader.state_dict()
        if (place := order.begin(Place(state["epoch"], state["position"]))) != recorded:
            raise RunError(
                f"after step {self.step} the loader is at position {place.position} of epoch {place.epoch}, and the "
                f"run at position {recorded.position} of epoch {recorded.epoch}",
                expected="a loader that only run.steps advances: a resume continues from its position",
                fix="inspect batches of another loader; leave out set_epoch and load_state_dict inside of the run",
            )

    def _start_of(self, loader: Any, order: Order) -> SegmentLine:
        """Where a loader continues; its rows are identified by their indices in the dataset."""
        if not self.step:
            self._refuse_moved(Place(0, 0), order)
        state = loader.state_dict()
        return SegmentLine.of(
            order,
            Place(state["epoch"], state["position"]),
            first_step=self.step + 1,
            topology=self.mesh.topology,
            every=self.config.audit.every,
            data=str(state["fingerprint"].get("data", "")),
            checkpoint=self.folder.resumed_from,
        )

    def _complete(self, *, due: bool = False) -> None:
        """The end of a step: whether the run stops, and whether something is compared or saved."""
        if self._trained is None:
            return
        if not self._trained:
            self.guards.tell({"step": self.step, "skipped": "no step(batch) with what it read"})
        self._trained = None
        if (audit := self.guards.audit) is not None and audit.start.every:
            self._refuse_moved(audit.place, audit.start.order)
        self._stopping = self.guards.after(self.step)
        self.guards.stop.saving = self._stopping
        self.guards.prove(self.step, saving=False)
        if due or self._stopping:
            self.save()

    def _end_of_program(self) -> bool:
        """Saves after the last step, and waits for it; returns whether a signal has stopped the run."""
        if not self._began:
            if self._start is None:
                self.say(
                    f"{self.folder.path}: nothing was audited or saved; for batch in run.steps(loader, until=...)"
                )
            return False
        self._complete()
        self.guards.stop.saving = True
        self.save()
        self.guards.progress.enter(CLOSING)
        for saver in self._savers():
            saver.wait()
        if self.folder.mirror is not None:
            self.folder.mirror.wait(self.watch.progress.tick)
        # What this folder holds: a saver of the model may also have saved elsewhere.
        newest = self.mesh.share(
            "saved", lambda: (each := self.folder.checkpoints.newest()) and each.step
        )
        saved = self.folder.done if newest is None else newest
        self.ended(self.step, stopped=self._stopping, saved=saved)
        if saved != self.step:
            raise RunError(
                f"the state after step {self.step} is not saved; the newest checkpoint is of step {saved}",
                expected="enough space, and a folder that every rank can write",
                fix="free space, and run the program again: it trains the steps since again",
            )
        return self._stopping

    def _failed(self, error: BaseException) -> None:
        note_error(error, self.mesh.rank, self.watch)
        self.watch.progress.enter("failure")
        log.error("%s: %s", type(error).__name__, error)
        for saver in self._savers():
            saver.join(LINGER_S)
        if self.folder.mirror is not None:
            self.folder.mirror.join(LINGER_S)

    def _require_open(self, what: str) -> None:
        if self._open != os.getpid():
            raise ConfigError(
                f"{what} outside of the run",
                expected="calls inside its `with`: before and after it, nothing is locked, watched or saved",
                fix="with threefold.Run(folder) as run: a new Run continues in the same folder",
            )

    def _require_begun(self, what: str) -> None:
        self._require_open(what)
        if self._start is not None and not self._began:
            with self._in_own_words():
                self._start()
        if not self._began:
            raise ConfigError(
                f"{what} before run.steps(...)",
                expected="a run that has begun: its folder is left unchanged until then",
                fix="call it inside of `for batch in run.steps(loader, until=...)`, or after it",
            )

    def _in_own_words(self) -> contextlib.AbstractContextManager[None]:
        return (
            in_program(lambda key, value: f"config={{{key!r}: {value!r}}}")
            if self._program
            else contextlib.nullcontext()
        )


def _config_of(values: Values, folder: str | Path | None) -> Config:
    nested: dict[str, dict[str, Any]] = {
        "log": {"dir": str(folder if folder is not None else new_path())}
    }
    for key, value in values.items():
        if key not in _KEYS:
            raise ConfigError(
                f"config has {key!r}",
                expected=f"keys that concern a program's run: {', '.join(_KEYS)}",
                fix=f"leave {key} out: the program decides it",
            )
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    config = loading.validate(nested)
    ConfigError.raise_for(trackers.problems(config.log.trackers))
    return config


def _passes(batches: Iterable[Any], run: Run) -> Iterator[Any]:
    """The batches, repeated forever; DataError if there are none."""
    before = -1  # the pass in which the run was saved may have nothing left
    while True:
        before, last = run.step, before
        yield from batches
        if run.step == before == last:
            raise DataError(
                f"there are no batches for step {run.step + 1}",
                expected="batches up to the last step: an exhausted iterator gives none when it is read again",
                fix="give run.steps a loader or a list; or until=None, to read it once",
            )


def _order_of(loader: Any) -> tuple[Order | None, str, str]:
    """The order in which a loader reads its rows; if rows cannot be audited: None, the reason, and the remedy."""
    from threefold.data.sampling.distribute import DistributedLoader

    if not isinstance(loader, DistributedLoader):
        return (
            None,
            f"{type(loader).__name__} does not say which rows it reads",
            "loader = threefold.distribute(DataLoader(...))",
        )
    sampler, rows = loader.sampler, loader.sampler.epoch_size
    if sampler.replacement or sampler.order != "threefold":
        drawn = "drawn with weights" if sampler.replacement else "in torch's order"
        return (
            None,
            f"rows {drawn} are not each read exactly once in a known order",
            "distribute(DataLoader(...))",
        )
    uneven = rows % sampler.num_replicas
    if sampler.tail == "pad" and uneven:
        return (
            None,
            f"{rows:,} rows are padded for {sampler.num_replicas} dp ranks",
            "distribute(loader, tail='exact')",
        )
    if sampler.tail == "drop" and uneven and not loader.drop_last:
        fix = "distribute(loader, tail='exact'), or a loader with drop_last=True"
        return None, f"tail='drop' leaves out {uneven} rows", fix
    size = (loader.batch_size or 1) * sampler.num_replicas
    return (
        Order(
            rows, size, sampler.seed, sampler.shuffle, "drop" if loader.drop_last else "exact"
        ),
        "",
        "",
    )


def _contents(batch: Any) -> list[Any]:
    """A fingerprint of the tensors of a batch, to compare between ranks that must have the same."""
    return [np.array([digest_of_rows([batch])], np.int64)] if isinstance(batch, Mapping) else []
