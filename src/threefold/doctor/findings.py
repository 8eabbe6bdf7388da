"""What a check has found: one line where all is well, three parts where it is not. No torch.

`stop` would end a run or keep it from starting; `warning` may cost time or fail later; `note` is worth knowing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "stop"]
_MARKS: dict[Level, str] = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "stop": "STOP   "}


@dataclass(frozen=True)
class Finding:
    """One thing that a check has looked at.

    Attributes:
        check: its name, the same on every machine.
        what: what there is, or what is wrong.
        expected, fix: set where the level is `warning` or `stop`.
    """

    check: str
    level: Level
    what: str
    expected: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{_MARKS[self.level]} {self.check}: {self.what}"]
        if self.expected:
            found.append(f"          expected: {self.expected}")
        if self.fix:
            found.append(f"          fix: {self.fix}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ok(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", what)


def note(check: str, what: str) -> Finding:
    """Worth knowing, and no fault."""
    return Finding(check, "note", what)


def warning(check: str, what: str, *, expected: str, fix: str) -> Finding:
    """May cost time, or fail later."""
    return Finding(check, "warning", what, expected, fix)


def stop(check: str, what: str, *, expected: str, fix: str) -> Finding:
    """Would keep a run from starting, or end it."""
    return Finding(check, "stop", what, expected, fix)


def render(findings: Iterable[Finding]) -> list[str]:
    """Lines for people, in the order of the checks."""
    return [line for finding in findings for line in finding.lines()]


def would_stop(findings: Sequence[Finding]) -> bool:
    """Whether one of them would stop a run."""
    return any(finding.level == "stop" for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of a report."""
    counts = {level: sum(finding.level == level for finding in findings) for level in ("stop", "warning")}
    if not any(counts.values()):
        return f"{len(findings)} checks, nothing in the way of a run"
    parts = [f"{counts['stop']} would stop a run" if counts["stop"] else "", f"{counts['warning']} warnings"]
    if counts["warning"] == 1:
        parts[1] = "1 warning"
    return f"{len(findings)} checks: " + ", ".join(part for part in parts if part and not part.startswith("0 "))
