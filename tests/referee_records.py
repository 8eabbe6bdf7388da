"""The verdict of the referee on the data of a record, for tests that are not about weights and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from threefold.referee.judge.verdict import CommandVerdict, judge

CURVE = ("copies of weights", "gradients", "norm of gradients", "updates", "targets")


def judge_data(folder: Path) -> CommandVerdict:
    verdict = judge(folder)
    return replace(
        verdict, parts=tuple(part for part in verdict.parts if part.name not in CURVE)
    )
