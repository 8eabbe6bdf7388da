"""Blocks of a file in a store, kept on a disk of this machine: each its own file, in a folder of bounded size.

All processes of a machine share the folder, and any of them may die at any moment. A block appears by a rename, so that
it is whole or absent. It is fetched by one process, while the others wait for its lock, which ends with its holder.
The block whose next use is farthest is evicted first; the caller knows which that is; otherwise the oldest goes.
"""

import fcntl
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.errors import NO_SPACE, RunError, size_text

log = logging.getLogger("threefold")

# Less than this is no cache: what the next steps read would push one another out.
LEAST_BLOCKS = 64
# Of the space that is free, and that the cache has already.
_SHARE = 0.5
_NUM_LOCKS = 256
# A process that is frozen while it fetches does not keep others from fetching themselves.
_LONGEST_LOCK_S = 30.0
_LEFT_BEHIND_S = 3600.0

StepsUntil = Callable[[int], float]


class BlockCache:
    """Blocks by their numbers. `num_blocks` is the capacity, not counting blocks that are being fetched."""

    def __init__(self, folder: Path, *, block_bytes: int, num_blocks: int) -> None:
        self._folder, self._block_bytes, self.num_blocks = folder, block_bytes, num_blocks
        self._lock, self._allowed = threading.Lock(), 0
        self._is_full = False

    def path(self, number: int) -> Path:
        """The path of a block, if it is cached."""
        return self._folder / f"{number:08d}"

    def get(self, number: int) -> bytes | None:
        """A block; None if it is not there."""
        try:
            return self.path(number).read_bytes()
        except FileNotFoundError:
            return None

    def numbers(self) -> list[int]:
        """The blocks that are there."""
        return [int(name) for name in os.listdir(self._folder) if name.isdecimal()]

    def fetch(self, number: int, read: Callable[[], bytes], steps_until: StepsUntil) -> bytes:
        """A block that another process has fetched meanwhile, or what `read` returns, which is kept.

        Args:
            steps_until: how many steps later a block is read.
        """
        data = None
        try:
            with self._locked(number):
                if (data := self.get(number)) is None:
                    data = read()
                    self._keep(number, data, steps_until)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "%s caches no more blocks; they are fetched each time they are read: %s",
                    self._folder,
                    error.strerror,
                )
        return read() if data is None else data

    def drop(self, number: int) -> None:
        """Removes a block, if it is cached."""
        self.path(number).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        until = time.monotonic() + _LONGEST_LOCK_S
        file = os.open(
            self._folder / f".lock-{number % _NUM_LOCKS:03d}",
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
        )
        try:
            while time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    time.sleep(0.005)
            yield
        finally:
            os.close(file)

    def _keep(self, number: int, data: bytes, steps_until: StepsUntil) -> None:
        """Keeps a block; on a disk filled by others, in place of one of ours; OSError if that fails too."""
        part = self._folder / f".{number:08d}.{os.getpid()}.{threading.get_ident()}.partial"
        try:
            self._make_room(self.num_blocks, steps_until)
            try:
                part.write_bytes(data)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._make_room(len(self.numbers()), steps_until, now=True)
                part.write_bytes(data)
            os.replace(part, self.path(number))
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, most: int, steps_until: StepsUntil, *, now: bool = False) -> None:
        """Evicts the blocks whose next use is farthest, so that a block can be added.

        A folder of many blocks is scanned only now and then, and room is made for several: for 1 in 256.
        """
        with self._lock:
            self._allowed -= 1
            if self._allowed >= 0 and not now:
                return
            blocks = []
            for entry in os.scandir(self._folder):
                with suppress(FileNotFoundError):
                    changed = entry.stat().st_mtime
                    if entry.name.isdecimal():
                        blocks.append((-steps_until(int(entry.name)), changed, entry.name))
                    elif (
                        entry.name.endswith(".partial")
                        and time.time() - changed > _LEFT_BEHIND_S
                    ):
                        os.unlink(entry.path)  # of a process that was killed
            together = max(1, min(len(blocks), most) // 256)
            for _, _, name in sorted(blocks)[: max(0, len(blocks) + together - most)]:
                (self._folder / name).unlink(missing_ok=True)
            self._allowed = together - 1


_FIX = "XDG_CACHE_HOME=FOLDER threefold ...   (a folder on a larger disk)"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises RunError if a folder of the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written: {error.strerror}",
            expected="a folder for the data that is in a store",
            fix=_FIX,
        ) from error


def open_cache(folder: Path, num_blocks: int, *, block_bytes: int) -> BlockCache:
    """The cache in a folder, of half of the space that is left there, or of all blocks.

    Raises:
        RunError: the folder cannot be written, or the disk is too small.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock-000").touch()
        used = sum(name.isdecimal() for name in os.listdir(folder))
        free = shutil.disk_usage(folder).free
    room = math.floor(_SHARE * (free / block_bytes + used))
    if room < (least := min(LEAST_BLOCKS, num_blocks)):
        raise RunError(
            f"the disk of {folder} has {size_text(free)} left",
            expected=f"{size_text(round(least * block_bytes / _SHARE))}: half of the space is for blocks of the data "
            "that is in a store",
            fix=_FIX,
        )
    return BlockCache(folder, block_bytes=block_bytes, num_blocks=min(room, num_blocks))
