"""What is known of an error: the lines that it shows itself by, its cause, and what to do, in order.

The tables are data: the command prints them, and a page is written for each in docs/errors/. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from threefold.explain.log import Line, Log


class Tier(IntEnum):
    """How near to the beginning of a failure an error stands: where a log has several, the nearest explains it."""

    CAUSE = 0
    SYMPTOM = 1
    CONSEQUENCE = 2


Facts = Callable[[Log, Sequence[Line]], list[str]]


def no_facts(log: Log, lines: Sequence[Line]) -> list[str]:
    """Of most errors the line itself says all there is."""
    return []


@dataclass(frozen=True)
class KnownError:
    """One error of the field.

    Attributes:
        name: of its page.
        title: what has happened, in one line.
        signs: regular expressions, each of one line of a log.
        cause: why it happens.
        steps: what to do, the most likely first.
        example: a line as it stands in a log.
        facts: what can be read from the lines that show it: sizes, ranks, ports.
    """

    name: str
    title: str
    signs: tuple[str, ...]
    cause: str
    steps: tuple[str, ...]
    example: str
    tier: Tier = Tier.CAUSE
    facts: Facts = no_facts
