"""Runs every stage of continuous integration, whatever fails, and ends with a table of all of them.

    python3 tools/ci.py [STAGE ...]

The stages that come first install. Then two lanes run side by side: one of stages that compute, each on all cores, and
one of stages that mostly wait for real processes. A stage's output is printed when it ends: all of it where the stage
failed, otherwise its end; every stage's log stays in `.ci/out`. A stage that passes its time limit is ended with all
that it has started, and named as hung. What cannot be had here (root, a package, a network) is skipped with its reason.

The exit code is the worst of the stages'. It needs nothing but Python 3.11.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
FIRST, COMPUTE, WAIT = "first", "compute", "wait"
TAIL_LINES = 15
GRACE_S = 10.0
ENDS_S = 3.0  # a server that was told to end still frees what it has imported
HUNG, NOT_RUN = 124, 1  # exit codes; 124 is that of timeout(1)

# Where tests/journal.py and the Makefile write; a process that carries a stage's token belongs to that stage.
JOURNAL, NOTES, TOKEN = "THREEFOLD_CI_JOURNAL", "THREEFOLD_CI_NOTES", "THREEFOLD_CI_TOKEN"

# As the C library and Python's faulthandler write them, from the start of a line.
CRASH = re.compile(
    r"^.{0,40}(malloc_consolidate|Fatal Python error: |Segmentation fault)", re.MULTILINE
)
CLOSING_LINE = re.compile(
    r"^=*\s*\d+ (passed|failed|skipped|errors?|deselected|rerun)\b.* in [\d.]+s.*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Stage:
    """One command, and how long it may take.

    Attributes:
        lane: FIRST stages run alone and one by one before the others, which are lost without them.
        prepare: a command without which this stage is skipped, not failed; empty where there is none.
        after: a stage of the other lane that this one waits for, however that ends.
    """

    name: str
    command: tuple[str, ...]
    lane: str
    limit_s: float
    prepare: tuple[str, ...] = ()
    after: str = ""


# Limits are a few times what a stage takes alone on two cores.
STAGES = (
    Stage("install", ("make", "install"), FIRST, 900),
    Stage("check", ("make", "check"), COMPUTE, 300),
    Stage("test", ("make", "test"), COMPUTE, 2400),
    Stage("test-ranks", ("make", "test-ranks"), COMPUTE, 2400),
    Stage("test-examples", ("make", "test-examples"), COMPUTE, 2700),
    # In this lane because the other one takes longer; not while the launchers' packages are installed.
    Stage("test-browser", ("make", "test-browser"), COMPUTE, 900, after="test-launchers"),
    Stage("test-oldest", ("make", "test-oldest"), COMPUTE, 900, after="install-oldest"),
    # Gigabytes of another torch: while others compute.
    Stage("install-oldest", ("make", "install-oldest"), WAIT, 900),
    Stage("test-launchers", ("make", "test-launchers"), WAIT, 1500),
    Stage("test-stores", ("make", "test-stores"), WAIT, 1500),
    Stage("test-faults", ("make", "test-faults", "KILLS=3"), WAIT, 2400),
    Stage(
        "docs",
        ("make", "docs"),
        WAIT,
        300,
        prepare=("make", ".venv-docs/.installed", ".venv-docs/mermaid.min.js"),
    ),
)


@dataclass
class Tests:
    """What the journals of a stage's pytest processes say: outcome by test, and what else is worth a line."""

    outcomes: dict[str, str] = field(default_factory=dict)
    retried: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        return sum(value == outcome for value in self.outcomes.values())

    def failed(self) -> list[str]:
        return [
            f"{test}: {self.why[test]}"
            for test, outcome in self.outcomes.items()
            if outcome == "failed"
        ]


@dataclass
class Result:
    """How a stage ended; `outcome` is passed, failed, hung, skipped, stopped or not run."""

    stage: Stage
    outcome: str
    code: int
    seconds: float = 0.0
    tests: Tests = field(default_factory=Tests)
    notes: list[str] = field(default_factory=list)


def read_tests(folder: Path) -> Tests:
    """Reads every journal in `folder`; a line that its writer could not finish is passed over."""
    tests = Tests()
    for path in sorted(folder.glob("*.jsonl")):
        running: dict[str, None] = {}
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                _take(json.loads(line), tests, running)
        tests.running += running
    return tests


def _take(event: dict[str, str], tests: Tests, running: dict[str, None]) -> None:
    test, kind = event["test"], event["event"]
    if kind == "start":
        running[test] = None
    elif kind == "finish":
        running.pop(test, None)
    elif kind == "crash":
        tests.crashes.append(f"{test}: {event['line']}")
    elif event["outcome"] == "rerun":
        tests.retried.append(f"{test}: {event['reason']}")
    elif event["outcome"] == "failed" or tests.outcomes.get(test) != "failed":
        # A test reports its set-up, its call and its end: one failure of them counts, and a skip says why.
        tests.outcomes[test] = event["outcome"]
        tests.why[test] = event["reason"]
        if event["outcome"] == "skipped":
            tests.reasons[event["reason"]] += 1


class Run:
    """The stages of one run of this program.

    Args:
        folder: gets a folder for each stage; what an earlier run has left there is removed.
        out: where everything is printed.
    """

    def __init__(
        self, stages: Sequence[Stage], folder: Path, out: IO[str], *, grace_s: float = GRACE_S
    ) -> None:
        self.stages = stages
        self.results: dict[str, Result] = {}
        self.stopped_by = 0
        self._folder = folder
        self._out = out
        self._grace_s = grace_s
        self._printing = threading.Lock()

    def stop(self, number: int, _frame: object = None) -> None:
        """Ends every stage; as a handler of signals."""
        self.stopped_by = self.stopped_by or number

    def __call__(self) -> int:
        """Runs all stages and prints the table; returns the worst exit code."""
        begun = time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._run_lane([stage for stage in self.stages if stage.lane == FIRST])
        broken = [
            result.stage.name for result in self.results.values() if result.outcome != "passed"
        ]
        if broken:
            for stage in self.stages:
                self.results.setdefault(
                    stage.name,
                    Result(stage, "not run", NOT_RUN, notes=[f"{broken[0]} did not pass"]),
                )
        lanes = [
            [stage for stage in self.stages if stage.lane == lane] for lane in (COMPUTE, WAIT)
        ]
        threads = [
            threading.Thread(target=self._run_lane, args=(lane,))
            for lane in lanes
            if not broken
        ]
        for thread in threads:
            thread.start()
        # With a limit, so that the main thread gets to its signal handlers.
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.1)
        results = [self.results[stage.name] for stage in self.stages]
        self._print("\n" + "\n".join(report(results, time.monotonic() - begun)))
        return (
            128 + self.stopped_by if self.stopped_by else max(result.code for result in results)
        )

    def _run_lane(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            self._wait_for(stage.after)
            if self.stopped_by:
                self.results[stage.name] = Result(
                    stage, "not run", NOT_RUN, notes=["the run was stopped before"]
                )
                continue
            self._print(f"--- {stage.name}: started")
            folder = self._folder / stage.name
            folder.mkdir(parents=True)
            try:
                result = self._run_stage(stage, folder)
            except Exception as error:  # the other stages still report
                result = Result(stage, "failed", 1, notes=[f"{type(error).__name__}: {error}"])
            self.results[stage.name] = result
            self._print_output(result, folder / "log.txt")

    def _wait_for(self, name: str) -> None:
        running = any(stage.name == name for stage in self.stages)
        while running and name not in self.results and not self.stopped_by:
            time.sleep(0.1)

    def _run_stage(self, stage: Stage, folder: Path) -> Result:
        begun = time.monotonic()
        log = folder / "log.txt"
        if stage.prepare:
            ended = self._run_command(stage.prepare, stage, folder)
            if isinstance(ended, int) and ended != 0:
                reason = (
                    log.read_text(errors="replace").strip().splitlines()
                    or ["it printed nothing"]
                )[-1]
                note = f"`{' '.join(stage.prepare)}` cannot be done here: {reason}"
                return Result(stage, "skipped", 0, time.monotonic() - begun, notes=[note])
        ended, strays = self._run_command(stage.command, stage, folder), list[str]()
        if not isinstance(ended, str):
            strays = _kill_strays(_token_of(folder))
        tests = read_tests(folder)
        notes = list(_notes(folder, tests))
        if strays:
            notes.append(
                f"processes left running, and killed: {len(strays)} ({'; '.join(strays)})"
            )
        seconds = time.monotonic() - begun
        if ended == "hung":
            running = f"; running: {', '.join(tests.running)}" if tests.running else ""
            return Result(
                stage,
                "hung",
                HUNG,
                seconds,
                tests,
                [f"no end within {stage.limit_s:g} s{running}", *notes],
            )
        if ended == "stopped":
            return Result(stage, "stopped", 128 + self.stopped_by, seconds, tests, notes)
        assert isinstance(ended, int)
        if ended == 0 and tests.outcomes and tests.count("skipped") == len(tests.outcomes):
            return Result(
                stage, "skipped", 0, seconds, tests, ["every test was skipped", *notes]
            )
        # A command that a signal has ended has a negative code.
        return Result(stage, "failed" if ended else "passed", abs(ended), seconds, tests, notes)

    def _run_command(self, command: Sequence[str], stage: Stage, folder: Path) -> int | str:
        """The exit code; `hung` or `stopped` where it was ended from here, with all that it had started."""
        token = _token_of(folder)
        variables = {
            JOURNAL: str(folder),
            NOTES: str(folder / "notes.txt"),
            TOKEN: token,
            "PYTHONFAULTHANDLER": "1",
        }
        # Without its bytecode every cold process would compile torch again.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE"
        }
        until = time.monotonic() + stage.limit_s
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**inherited, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.1)
                if self.stopped_by or time.monotonic() > until:
                    self._end(process, token)
                    return "stopped" if self.stopped_by else "hung"

    def _end(self, process: subprocess.Popen[bytes], token: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Ranks and daemons have process groups of their own.
        _kill_strays(token)
        process.wait()

    def _print(self, text: str) -> None:
        with self._printing:
            print(text, file=self._out, flush=True)

    def _print_output(self, result: Result, log: Path) -> None:
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = text.rstrip().splitlines()
        if result.outcome in ("passed", "skipped"):
            tail = lines[-TAIL_LINES:]
            closing = [match.group() for match in CLOSING_LINE.finditer(text)]
            lines = [line for line in closing if line not in tail] + tail
        heading = (
            f"=== {result.stage.name}: {result.outcome} after {result.seconds:.0f} s ({log})"
        )
        self._print("\n".join(["", heading, *lines, f"=== end of {result.stage.name}"]))


def _token_of(folder: Path) -> str:
    """The token of a stage's processes, made when it is first asked for."""
    path = folder / "token.txt"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _notes(folder: Path, tests: Tests) -> Iterator[str]:
    notes = folder / "notes.txt"
    if notes.exists():
        yield from dict.fromkeys(notes.read_text().splitlines())
    log = (folder / "log.txt").read_text(errors="replace")
    crashes = [*(match.group() for match in CRASH.finditer(log)), *tests.crashes]
    if crashes:
        yield f"a process crashed ({len(crashes)} times in the output): {crashes[0]}"


def _kill_strays(token: str) -> list[str]:
    """Kills every process that carries a stage's token and does not end now; returns how their commands begin."""
    until, commands = time.monotonic() + ENDS_S, dict[Path, str]()
    # A process that becomes another program has no environment for a moment.
    seen_none = 0
    while seen_none < 2:
        seen_none = 0 if _with_token(token) else seen_none + 1
        if time.monotonic() > until:
            for process in _with_token(token):
                with contextlib.suppress(OSError):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    os.kill(int(process.name), signal.SIGKILL)
                    commands[process] = command.decode(errors="replace").strip()[:100]
        time.sleep(0.2)
    return [*commands.values()]


def _with_token(token: str) -> list[Path]:
    mark, processes = f"{TOKEN}={token}".encode(), list[Path]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                processes.append(path.parent)
    return processes


def report(results: Sequence[Result], seconds: float) -> Iterable[str]:
    """The table of the stages, and below it what failed, what was retried and what was skipped."""
    columns = ("passed", "failed", "skipped", "retried")
    width = max(len(result.stage.name) for result in results)
    yield f"{'stage':{width}}  {'result':8} {'seconds':>7}  {'  '.join(columns)}"
    for result in results:
        counts = [result.tests.count(name) for name in columns[:-1]] + [
            len(result.tests.retried)
        ]
        figures = "  ".join(
            f"{count if result.tests.outcomes else '-':>{len(name)}}"
            for name, count in zip(columns, counts, strict=True)
        )
        line = (
            f"{result.stage.name:{width}}  {result.outcome:8} {result.seconds:7.0f}  {figures}"
        )
        yield f"{line}  {'; '.join(result.notes)}".rstrip()
    yield f"all stages: {seconds:.0f} s"
    yield from _listed("failed", ((result, result.tests.failed()) for result in results))
    yield from _listed("retried", ((result, result.tests.retried) for result in results))
    skips = (
        (
            result,
            [f"{count} x {reason}" for reason, count in result.tests.reasons.most_common()],
        )
        for result in results
    )
    yield from _listed("skipped", skips)


def _listed(heading: str, items: Iterable[tuple[Result, list[str]]]) -> Iterator[str]:
    lines = [f"  {result.stage.name}: {text}" for result, texts in items for text in texts]
    if lines:
        yield from ("", f"{heading}:", *lines)


def chosen(names: Sequence[str]) -> list[Stage]:
    """The stages of these names, after those that come first in any case; all of them where no name is given."""
    return [
        stage for stage in STAGES if not names or stage.name in names or stage.lane == FIRST
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"default: all of {', '.join(names)}"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.stages) - set(names)):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(names)}")
    run = Run(chosen(options.stages), ROOT / ".ci" / "out", sys.stdout)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.stop)
    return run()


if __name__ == "__main__":
    sys.exit(main())
