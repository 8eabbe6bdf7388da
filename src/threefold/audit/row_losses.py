"""RUN/rows/rank-NNNN.bin: the loss of every row of every step, a few bytes a row, and reading them back. No torch.

Each rank that holds its own part of rows (of tp ranks, the first) appends a record per step:

    header   44 bytes, see `_HEADER`: the start of the run (as in audit.jsonl), the step, whose part it is, its rows
    losses   float32 [rows]: cross entropy summed over the part's targets; of cp ranks the parts are added
    counts   uint32 [rows]: targets of the whole row, the same on all cp ranks; left out if all rows have as many

A checksum covers each record, so one that was changed or cut is named and the others are read. Row numbers are not
stored: row j of dp rank d is place j * dp + d of the step, whose rows the order knows. For a step that was trained more
than once, the record of the valid start counts, as in audit.jsonl.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threefold.arrays import Float32, Float64, Int64
from threefold.audit.record import Segment

FOLDER = "rows"
_MAGIC = b"3row"
# Magic, checksum of what follows it, segment, step, dp rank, dp size, cp rank, cp size, rows, targets of each row.
_HEADER = struct.Struct("<4sIIQIIIIII")
_CHECKED = 8  # where the bytes under the checksum begin
_EACH_ITS_OWN = 0xFFFFFFFF
_MOST_BYTES = 1 << 30


class RankPart(NamedTuple):
    """Whose part of the rows a record has: a dp rank's, and of these a cp rank's."""

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int


class _LossRecord(NamedTuple):
    segment: int
    step: int
    part: RankPart
    rows: int
    targets: int


class _Place(NamedTuple):
    """Where the payload of a record is."""

    file: int
    offset: int
    record: _LossRecord


class StepLosses(NamedTuple):
    """For each row of a step, in the order of the step, [rows]: summed loss and targets; NaN and 0 if lost.

    `whole`: no row of the step is.
    """

    sums: Float64
    counts: Int64
    whole: bool = True

    @property
    def means(self) -> Float64:
        """Loss of a target, [rows]; NaN for a row without one."""
        return np.divide(
            self.sums, self.counts, out=np.full(len(self.sums), np.nan), where=self.counts > 0
        )


def packed(segment: int, step: int, part: RankPart, sums: Float32, counts: Int64) -> bytes:
    """The record of a step."""
    same = len(counts) > 0 and bool((counts == counts[0]).all())
    payload = sums.astype("<f4").tobytes() + (b"" if same else counts.astype("<u4").tobytes())
    count = int(counts[0]) if same else _EACH_ITS_OWN
    header = _HEADER.pack(_MAGIC, 0, segment, step, *part, len(sums), count)
    checksum = zlib.crc32(payload, zlib.crc32(header[_CHECKED:]))
    return header[:4] + struct.pack("<I", checksum) + header[_CHECKED:] + payload


@dataclass
class RowLosses:
    """The losses of the rows of a run's steps, by its valid history.

    Attributes:
        damaged: the damaged ranges of files, in words.
    """

    damaged: list[str] = field(default_factory=list)
    _files: list[bytes] = field(default_factory=list)
    _places: dict[int, list[_Place]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The steps of which something is kept, ascending."""
        return sorted(self._places)

    def of(self, step: int) -> StepLosses | None:
        """The rows of a step; None if nothing is kept of it."""
        if not (places := self._places.get(step)):
            return None
        first = places[0].record
        rows, (dp, cp) = first.rows, (first.part.dp_size, first.part.cp_size)
        # (dp rank, row, cp rank)
        sums = np.zeros((dp, rows, cp))
        counts = np.zeros((dp, rows), np.int64)
        for place in places:
            part = place.record.part
            sums[part.dp_rank, :, part.cp_rank], counts[part.dp_rank] = self._read(place)
        parts = [place.record.part.dp_rank for place in places]
        lost = [rank for rank in range(dp) if parts.count(rank) < cp]
        sums[lost], counts[lost] = np.nan, 0
        return StepLosses(sums.sum(-1).T.reshape(-1), counts.T.reshape(-1), not lost)

    def _read(self, place: _Place) -> tuple[Float32, Int64]:
        content, (_, _, _, rows, count) = self._files[place.file], place.record
        sums = np.frombuffer(content, "<f4", rows, place.offset)
        if count != _EACH_ITS_OWN:
            return sums, np.full(rows, count, np.int64)
        return sums, np.frombuffer(content, "<u4", rows, place.offset + 4 * rows).astype(
            np.int64
        )


def read(run: Path, segments: Sequence[Segment]) -> RowLosses:
    """The losses that a run has kept, if any. `segments`: its valid history (`audit.record`)."""
    losses = RowLosses()
    for path in sorted((run / FOLDER).glob("rank-*.bin")):
        content = path.read_bytes()
        number = len(losses._files)
        losses._files.append(content)
        end = 0
        for offset, record in _records(content):
            if offset > end:
                losses.damaged.append(_damage(path, end, offset))
            payload = offset + _HEADER.size
            end = payload + _payload_bytes(record)
            if _is_valid(record, segments):
                own = losses._places.setdefault(record.step, [])
                own[:] = [each for each in own if each.record.part != record.part]
                own.append(_Place(number, payload, record))
        if end < len(content):
            losses.damaged.append(_damage(path, end, len(content)))
    # Records of a step that contradict one another are of no use, whichever is wrong.
    for step, places in list(losses._places.items()):
        records = [each.record for each in places]
        if len({(each.rows, each.part.dp_size, each.part.cp_size) for each in records}) > 1:
            losses.damaged.append(f"the records of step {step} are of different meshes")
            del losses._places[step]
    return losses


def _records(content: bytes) -> Iterator[tuple[int, _LossRecord]]:
    """(where it begins, its header) of each whole record, in order."""
    at = 0
    while (at := content.find(_MAGIC, at)) >= 0:
        record = _record_at(content, at)
        if record is None:
            at += 1
            continue
        yield at, record
        at += _HEADER.size + _payload_bytes(record)


def _record_at(content: bytes, at: int) -> _LossRecord | None:
    if at + _HEADER.size > len(content):
        return None
    _, checksum, segment, step, dp_rank, dp_size, cp_rank, cp_size, rows, count = (
        _HEADER.unpack_from(content, at)
    )
    record = _LossRecord(
        segment, step, RankPart(dp_rank, dp_size, cp_rank, cp_size), rows, count
    )
    end = at + _HEADER.size + _payload_bytes(record)
    if end - at > _MOST_BYTES or end > len(content) or dp_rank >= dp_size or cp_rank >= cp_size:
        return None
    return record if zlib.crc32(memoryview(content)[at + _CHECKED : end]) == checksum else None


def _payload_bytes(record: _LossRecord) -> int:
    return record.rows * (8 if record.targets == _EACH_ITS_OWN else 4)


def _is_valid(record: _LossRecord, segments: Sequence[Segment]) -> bool:
    own = next((each for each in segments if each.start.segment == record.segment), None)
    return (
        own is not None
        and own.start.first_step <= record.step
        and (own.last_step is None or record.step <= own.last_step)
    )


def _damage(path: Path, begin: int, end: int) -> str:
    return f"{path}: bytes {begin:,} to {end - 1:,} are not what was written, and are left out"
