"""`threefold explain`: a failed program's output from a file, a folder of logs or a pipe -> cause and remedy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from threefold.errors import EXIT_FAILED, ConfigError

# Ours, and torchrun's --log-dir: attempt_0/3/stderr.log.
_BEGIN = " INFO threefold: process "
_RANK_OF_FILE = re.compile(r"rank-(\d+)\.log$|/(\d+)/(?:std(?:out|err)|error)\.\w+$")


def command(
    log: Annotated[
        Path | None, typer.Argument(help="A failed program's output, or a folder of logs; default: a pipe.")
    ] = None,
) -> None:
    """Explain a failed run's log: what happened, which line matters, and what to do.

    For any torch.distributed program: threefold explain train.log, or ... 2>&1 | threefold explain.
    """
    text, code = explain_command(log)
    typer.echo(text)
    sys.exit(code)


def explain_command(path: Path | None) -> tuple[str, int]:
    """(what to print, exit code); ConfigError if there is no such log, or nothing is piped in (`path` is None)."""
    from threefold.explain import explain
    from threefold.explain.known import PAGES

    text = _read_input() if path is None else _read(path)
    found = explain.explain(text)
    if found is not None:
        return found.text(), 0
    last = explain.last_error(text)
    lines = ["unknown: threefold does not know any error in this log"]
    if last is not None:
        lines.append(f"  the last error in it: {last.where()}: {last.text.strip()}")
    lines.append(f"  the errors that it does know: {PAGES}")
    return "\n".join(lines), EXIT_FAILED


def _read_input() -> str:
    if sys.stdin.isatty():
        fix = "threefold explain train.log, or: torchrun ... 2>&1 | tee train.log | threefold explain"
        raise ConfigError("no log given, and nothing piped in", expected="the output of a failed program", fix=fix)
    return sys.stdin.buffer.read().decode(errors="replace")


def _read(path: Path) -> str:
    if path.is_dir():
        files = sorted(file for kind in ("*.log", "*.err", "*.out") for file in path.rglob(kind))
    else:
        files = [path] if path.exists() else []
    if not files:
        what = f"{path} contains no log" if path.is_dir() else f"{path} does not exist"
        fix = "threefold explain train.log, or a pipe: ... 2>&1 | threefold explain"
        raise ConfigError(what, expected="a log, or a folder with .log, .err or .out files", fix=fix)
    try:
        return "\n".join(_of_file(file, named=path.is_dir()) for file in files)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(what, expected="a readable log", fix=f"look at: ls -l {path}") from error


def _of_file(path: Path, *, named: bool) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    rank = _RANK_OF_FILE.search(path.as_posix()) if named else None
    if rank is None:
        return text
    number = rank[1] or rank[2]
    # A resumed run appends; only its last start counts.
    lines = text.splitlines()
    begin = max((place for place, line in enumerate(lines) if _BEGIN in line), default=0)
    return "".join(f"[rank{int(number)}]: {line}\n" for line in lines[begin:])
