"""Opens the files of a run's folder, which another user may have made, and may be changing meanwhile.

What is no file (a FIFO, a device) would make a reader wait for ever; a link that leads out of the folder would put a
file of the reader's own into a page that is passed on. Both are refused as files that cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from threefold.config.paths import RUN_CONFIG
from threefold.errors import ConfigError

# A page asks for no more of one file at once.
MOST_BYTES = 1 << 26
# YAML is slow to read, some 20 KB a second; a run's config has some KB.
MOST_OF_CONFIG = 1 << 18
# What other rooms read of a run, without asking what it is.
_READ = (
    "*.json", "*.jsonl", "*.yaml", "rows/*", "profile/*.json", "checkpoints/*.json",
    "checkpoints/*-step-*/*", "checkpoints/step-*/*",
)  # fmt: skip
_NO_FILE = "it is not a file"


def opened(path: Path) -> BinaryIO:
    """The file of a path, for reading.

    Raises:
        OSError: it is not there, is no file, or is a link to one outside of its folder.
    """
    if _leads_out(path, path.parent):
        raise OSError(errno.ELOOP, "it is a link that leads out of its folder", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return os.fdopen(descriptor, "rb")


def content_of(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """What a file holds.

    Raises:
        OSError: as `opened`, or it is too large for a page.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 10:,} KiB", str(path))
    return content


def strange(run: Path) -> Iterator[tuple[str, str]]:
    """What of a run is no file, or leads out of its folder: (path in it, what is wrong)."""
    for pattern in _READ:
        for path in sorted(run.glob(pattern)):
            with contextlib.suppress(OSError):  # it is gone, or a link to nothing
                mode = path.stat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    yield path.relative_to(run).as_posix(), _NO_FILE
                elif path.name == RUN_CONFIG and path.stat().st_size > MOST_OF_CONFIG:
                    yield path.relative_to(run).as_posix(), f"it is larger than {MOST_OF_CONFIG >> 10:,} KiB"
                elif stat.S_ISREG(mode) and _leads_out(path, run):
                    yield path.relative_to(run).as_posix(), "it is a link that leads out of the run's folder"


def check_files(run: Path) -> None:
    """Before the files of a run are read by who waits for what they hold.

    Raises:
        ConfigError: one of them is no file: a FIFO or a device, of which nobody can say when it ends.
    """
    for name, wrong in strange(run):
        if wrong == _NO_FILE:
            what = f"{run / name} is not a file, but a FIFO, a socket or a device"
            fix = f"was this run copied from somebody? Look at: ls -l {shlex.quote(str(run / name))}"
            raise ConfigError(what, expected="a run as threefold writes it: files and folders", fix=fix)


def _leads_out(path: Path, folder: Path) -> bool:
    try:
        return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # a loop of links
        return True
