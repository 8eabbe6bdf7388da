"""The lengths of a run's rows, kept in its folder where its order depends on them (`data.group_by_length`).

`lengths/DIGEST.i32`: tokens of each row, little-endian int32. The record names the digest, so that the order can be
computed again without the source, from the lengths that the run had. No torch.
"""

from pathlib import Path

import numpy as np

from threefold.data.order.length_buckets import LengthsOf
from threefold.data.text.known_bytes import content_digest
from threefold.errors import RunError
from threefold.jsonl import write_whole

FOLDER = "lengths"
_TYPE = np.dtype("<i4")


def keep(run: Path, lengths: LengthsOf, num_rows: int) -> str:
    """Writes the lengths of all rows into a run's folder, and returns their digest."""
    content = lengths(np.arange(num_rows, dtype=np.int64)).astype(_TYPE).tobytes()
    place = _place(run, content_digest(content))
    place.parent.mkdir(exist_ok=True)
    write_whole(place, [content])
    return place.stem


def stored(run: Path, digest: str, num_rows: int) -> LengthsOf:
    """The lengths that a run kept; a RunError if they are not there, or not what the record names."""
    place = _place(run, digest)
    try:
        content = place.read_bytes()
    except OSError as error:
        content = b""
        what = f"{place} cannot be read: {error.strerror}"
    else:
        what = f"{place} has changed: it is not what audit.jsonl names"
    if len(content) != num_rows * _TYPE.itemsize or content_digest(content) != digest:
        raise RunError(
            what,
            expected="the lengths of the run's rows: without them, which rows a step read is unknown",
            fix="restore the file from a copy of the run   (threefold resume RUN rewrites it)",
        )
    lengths = np.frombuffer(content, _TYPE)
    return lambda rows: lengths[rows].astype(np.int64)


def _place(run: Path, digest: str) -> Path:
    return run / FOLDER / f"{digest}.i32"
