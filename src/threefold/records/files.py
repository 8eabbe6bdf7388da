"""The files of a run's folder, which another user may have made, and may be changing meanwhile."""

import contextlib
import errno
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from threefold.config.paths import RUN_CONFIG
from threefold.errors import ConfigError, shell_word
from threefold.jsonl import Values, leads_out, object_of, open_file

SAMPLES = "samples.jsonl"
# A reader asks for no more of one file at once.
MOST_BYTES = 1 << 26
# YAML is slow to read, some 20 KB a second; a run's config has some KB.
MOST_OF_CONFIG = 1 << 18
# What other rooms read of a run, without asking what it is.
_READ = (
    "*.json", "*.jsonl", "*.yaml", "rows/*", "blocks/*", "profile/*.json", "checkpoints/*.json",
    "checkpoints/*-step-*/*", "checkpoints/step-*/*",
)  # fmt: skip


def content_of(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The contents of a file.

    Raises:
        OSError: as `open_file`, or it is too large.
    """
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 10:,} KiB", str(path))
    return content


def json_of(path: Path) -> Values:
    """The JSON object in a file; errors as `content_of`, ValueError for anything else."""
    values = object_of(content_of(path))
    if values is None:
        raise ValueError("it is not a JSON object")
    return values


def unsafe_files(run: Path) -> Iterator[tuple[str, str]]:
    """Paths of a run that lead out of its folder or cannot be read: (path in it, problem)."""
    for path in _no_files(run):
        yield path.relative_to(run).as_posix(), "it is not a file"
    for path in _read(run):
        with contextlib.suppress(OSError):  # it is gone, or a link to nothing
            status = path.stat()
            if path.name == RUN_CONFIG and status.st_size > MOST_OF_CONFIG:
                yield (
                    path.relative_to(run).as_posix(),
                    f"it is larger than {MOST_OF_CONFIG >> 10:,} KiB",
                )
            elif stat.S_ISREG(status.st_mode) and leads_out(path, run):
                yield (
                    path.relative_to(run).as_posix(),
                    "it is a link that leads out of the run's folder",
                )


def check_files(run: Path) -> None:
    """Before the files of a run are read by a caller that waits for what they hold.

    Raises:
        ConfigError: one of them is no file: a FIFO or a device, whose end cannot be known.
    """
    for path in _no_files(run):
        raise ConfigError(
            f"{path} is not a file, but a FIFO, a socket or a device",
            expected="a run as threefold writes it: files and folders",
            fix=f"was this run copied from somebody? Look at: ls -l {shell_word(path)}",
        )


def _no_files(run: Path) -> Iterator[Path]:
    for path in _read(run):
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield path


def _read(run: Path) -> Iterator[Path]:
    for pattern in _READ:
        yield from sorted(run.glob(pattern))


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each of some runs: its folder's, or its path where two folders have the same."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
