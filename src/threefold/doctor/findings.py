"""Results of checks: one line if all is well, three parts otherwise. No torch.

`stop` would end a run or keep it from starting; `warning` may cost time or fail later; `note` is worth knowing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "stop"]
_MARKS: dict[Level, str] = {
    "ok": "ok     ",
    "note": "note   ",
    "warning": "WARNING",
    "stop": "STOP   ",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a check has examined.

    Attributes:
        check: its name, the same on every machine.
        what: the value that was found, or the fault.
        expected, fix: set if the level is `warning` or `stop`.
    """

    check: str
    level: Level
    what: str
    expected: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """The finding as text."""
        lines = [f"{_MARKS[self.level]} {self.check}: {self.what}"]
        if self.expected:
            lines.append(f"          expected: {self.expected}")
        if self.fix:
            lines.append(f"          fix: {self.fix}")
        return lines


def ok(check: str, what: str) -> Finding:
    """A value that a run can work with."""
    return Finding(check, "ok", what)


def note(check: str, what: str) -> Finding:
    """Worth knowing, but not a fault."""
    return Finding(check, "note", what)


def warning(check: str, what: str, expected: str, fix: str) -> Finding:
    """May cost time, or fail later."""
    return Finding(check, "warning", what, expected, fix)


def stop(check: str, what: str, expected: str, fix: str) -> Finding:
    """Would keep a run from starting, or end it."""
    return Finding(check, "stop", what, expected, fix)


def judged(
    check: str, what: str, fits: bool, expected: str, fix: str, *, otherwise: Level = "stop"
) -> Finding:
    """`ok` if the value fits, otherwise a finding of the given level."""
    return ok(check, what) if fits else Finding(check, otherwise, what, expected, fix)


def would_stop(findings: Sequence[Finding]) -> bool:
    """Whether one of them would stop a run."""
    return any(finding.level == "stop" for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of a report."""
    stops, warnings = (
        sum(finding.level == level for finding in findings) for level in ("stop", "warning")
    )
    parts = [f"{stops} would stop a run"] if stops else []
    if warnings:
        parts.append("1 warning" if warnings == 1 else f"{warnings} warnings")
    return f"{len(findings)} checks: {', '.join(parts) or 'nothing would stop a run'}"
