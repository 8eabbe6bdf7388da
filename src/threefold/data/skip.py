"""Batches that a run leaves out, as people do after a spike of the loss: `data.skip`, ranges of steps given on resume.

The rule: a range [first, last] stands for the batches that the steps first to last would have read. They are left out
in one go when the run comes to step `first`, which then reads the batch that step last + 1 would have read. So step
numbers have no holes, every step trains, and the place in the order moves on by last - first + 1 batches more. A range
counts in the run as it goes: where one was left out before, later ranges mean the steps of the run that has left it
out.

What stays true: a range is left out once. The loader's state keeps the ranges that were left out, so a resume after
step `first` does not leave them out again, and a resume before it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from threefold.errors import ConfigError, Problem

StepRange = tuple[int, int]
"""First and last step, both included."""


def skips_ahead(skip: Sequence[StepRange], *, first_step: int, left_out: Sequence[StepRange]) -> dict[int, StepRange]:
    """The ranges still to be left out, each by the step before whose batch that happens.

    Args:
        skip: what `data.skip` asks for.
        first_step: the next step of the run.
        left_out: ranges that the run has left out already; they are passed over.

    Raises:
        ConfigError: a range begins with a step that is done.
    """
    ahead = [(first, last) for first, last in skip if (first, last) not in set(left_out)]
    problems = [
        Problem(
            f"data.skip has [{first}, {last}], but step {first} is done: the run goes on with step {first_step}",
            "ranges of steps that are still to come: what was trained on cannot be left out afterwards",
            f"--checkpoint.resume RUN/checkpoints/step-...   (one before step {first}), or leave the range out",
        )
        for first, last in ahead
        if first < first_step
    ]
    if problems:
        raise ConfigError.of(problems)
    return {first: (first, last) for first, last in ahead}


def steps_left(num_steps: int, *, skip: Iterable[StepRange]) -> int:
    """Steps of a run whose batches are `num_steps`, without those that are left out."""
    for first, last in sorted(skip):
        if first <= num_steps:
            num_steps = max(first - 1, num_steps - num_batches([(first, last)]))
    return num_steps


def num_batches(ranges: Iterable[StepRange]) -> int:
    """How many batches the ranges leave out."""
    return sum(last - first + 1 for first, last in ranges)
