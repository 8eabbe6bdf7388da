"""What a run does beside its steps and saves, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from threefold.run.assemble import Built
from threefold.run.eval_samples import EvalSamples
from threefold.run.eval_tasks import EvalTasks
from threefold.run.exports import Exports


class Besides(NamedTuple):
    """Each has a `progress`, which is to be the run's."""

    exports: Exports
    sample: EvalSamples | None
    tasks: EvalTasks | None


def besides_of(run: Built, *, say: Callable[[str], None]) -> Besides:
    """Every rank calls it.

    Raises:
        ConfigError: a prompt or a task cannot be used.
    """
    sample = EvalSamples(run, say=say) if run.config.eval.sample else None
    tasks = EvalTasks(run.config, run.model) if run.config.eval.tasks else None
    return Besides(Exports(run.checkpointer, say=say), sample, tasks)
