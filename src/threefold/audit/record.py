"""The contents of audit.jsonl: one line at every start of a run, at every audit, and for batches that were left out.

In: the lines, in the order they were written. Out: the valid history. A start at step s supersedes what was
recorded of steps from s on: a run that was killed and resumed from an older checkpoint has read these steps again, and
only the last pass counts: the weights were trained on it. A torn last line is ignored.

    segment   a start: the mesh, what the order is made of, the first step and where it begins
    steps     an audit: steps first to last, where the first begins, each dp rank's digests (see `digest`)
    skip      batches left out before a step (see `data.order`)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

from threefold.audit import row_lengths
from threefold.audit.digest import TOKEN_FIELDS
from threefold.data.order.length_buckets import LengthsOf
from threefold.data.order.mixture import Mixture
from threefold.data.order.order import Order, Place
from threefold.data.order.partition import Tail
from threefold.data.order.permutation import ORDER_VERSION, check_order_version
from threefold.errors import ConfigError, RunError, ThreefoldError
from threefold.jsonl import Values, from_json
from threefold.mesh.topology import Topology

FILE = "audit.jsonl"
# Rows of a step beyond those that there are, and ranks; more are a damaged number.
_MOST_ROWS, _MOST_RANKS = 1 << 22, 1 << 24
_RESTORE = "restore the file; without its record nothing about the run can be proved"

_Line = TypeVar("_Line", bound="_AuditLine")


@dataclass(frozen=True)
class _AuditLine:
    """A line of the file: `kind`, then the fields; digests as 16 hexadecimal digits."""

    @property
    def place(self: Any) -> Place:
        return Place(self.epoch, self.position)

    def to_record(self) -> Values:
        """Plain values, ready for JSON."""
        values = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "lengths"
        }
        for name in ("samples", "contents"):
            if name in values:
                values[name] = [f"{digest:016x}" for digest in values[name]]
        return {"kind": _KIND_OF[type(self)], **values}

    @classmethod
    def from_record(cls: type[_Line], record: Values) -> _Line:
        """The inverse of `to_record`; ValueError, TypeError or KeyError for anything else."""
        values = {
            entry.name: record[entry.name] for entry in fields(cls) if entry.name != "lengths"
        }
        for name in ("samples", "contents"):
            if name in values:
                values[name] = tuple(int(digest, 16) for digest in values[name])
        return cls(**{name: _as_tuple(value) for name, value in values.items()})


@dataclass(frozen=True)
class SegmentLine(_AuditLine):
    """A start of the run, from step 1 or from a checkpoint."""

    segment: int
    first_step: int
    epoch: int
    position: int
    mesh: tuple[int, int, int, int]
    global_batch: int
    num_rows: int
    seed: int
    shuffle: bool
    tail: Tail
    order_version: int
    data: str
    """fingerprint of the rows."""
    mixture: tuple[tuple[str, int, int], ...] | None
    """(name, rows, turns in a period) of each source; None: there is one source."""
    every: int
    checkpoint: str | None
    """the one that the run resumes from."""
    epochs: int | None = None
    """where the order ends; None: nowhere."""
    tensors: tuple[str, ...] = ("input_ids", "labels")
    """tensors that the digests `contents` are made of."""
    stores: tuple[tuple[str, str, str], ...] = ()
    """(name, digest of its bytes, prefix on the first host) of each source's store; none: not known."""
    grouped: str | None = None
    """digest of the rows' lengths, by which they are grouped (`row_lengths`); None: they are not."""
    link: str | None = None
    """checksum of the start, which the checkpoints that it writes hold, too; None: of no run (a Trainer's)."""
    lengths: LengthsOf | None = field(default=None, compare=False, repr=False)
    """the rows' lengths, which are in a file of their own."""

    def __post_init__(self) -> None:
        numbers = [
            self.segment,
            self.first_step,
            self.epoch,
            self.position,
            self.num_rows,
            self.every,
        ]
        numbers += [self.global_batch, *self.mesh, self.order_version]
        _check(all(_is_count(number) for number in numbers) and len(self.mesh) == 4)
        _check(
            min(self.segment, self.first_step, self.num_rows, self.global_batch, *self.mesh) > 0
        )
        _check(
            self.global_batch <= max(_MOST_ROWS, self.num_rows)
            and self.topology.world_size <= _MOST_RANKS
        )
        _check(self.tail in get_args(Tail) and self.global_batch % self.topology.dp == 0)
        _check(self.epochs is None or (_is_count(self.epochs) and self.epochs > 0))
        if self.mixture is not None:
            _check(
                self.tail != "carry"
                and self.num_rows == sum(size for _, size, _ in self.mixture)
            )
        _check(
            isinstance(self.data, str)
            and isinstance(self.shuffle, bool)
            and type(self.seed) is int
        )
        _check(set(self.tensors) <= set(TOKEN_FIELDS) and isinstance(self.link, str | None))
        _check(all(isinstance(text, str) for store in self.stores for text in store))
        _check(all(len(store) == 3 for store in self.stores))
        _check(
            self.grouped is None
            or (re.fullmatch("[0-9a-f]{32}", self.grouped) and self.mixture is None)
        )

    @classmethod
    def of(
        cls,
        order: Order,
        place: Place,
        *,
        first_step: int,
        topology: Topology,
        every: int,
        data: str = "",
        checkpoint: str | None = None,
    ) -> "SegmentLine":
        """The first start of a run in `order`, whose step `first_step` begins at `place`."""
        mixture = described(order.mixture) if order.mixture is not None else None
        rows: tuple[Any, ...] = (
            order.global_batch,
            order.num_rows,
            order.seed,
            order.shuffle,
            order.tail,
        )
        rows += (ORDER_VERSION, data, mixture, every, checkpoint, order.epochs)
        return cls(1, first_step, *order.begin(place), topology.sizes, *rows)

    @property
    def topology(self) -> Topology:
        return Topology(*self.mesh)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each source's bytes, by its name; of none if they were not known."""
        return {name: digest for name, digest, _ in self.stores}

    @cached_property
    def order(self) -> Order:
        """The order that the run followed."""
        sizes = (self.num_rows, self.global_batch, self.seed, self.shuffle, self.tail)
        assert self.grouped is None or self.lengths is not None
        order = Order(*sizes, epochs=self.epochs, lengths=self.lengths)
        if self.mixture is None:
            return order
        rows = {name: size for name, size, _ in self.mixture}
        turns = {name: turns for name, _, turns in self.mixture}
        return replace(order, mixture=Mixture(rows, turns, seed=self.seed))


def described(mixture: Mixture) -> tuple[tuple[str, int, int], ...]:
    """(name, rows, turns in a period) of each source: the same mixture can be made from them."""
    return tuple(zip(mixture.names, mixture.sizes, mixture.quotas, strict=True))


@dataclass(frozen=True)
class StepsLine(_AuditLine):
    """An audit of the steps `first` to `last`, whose first begins at (epoch, position)."""

    segment: int
    first: int
    last: int
    epoch: int
    position: int
    samples: tuple[int, ...]
    """by dp rank."""
    contents: tuple[int, ...]
    """by dp rank."""
    faults: tuple[str, ...] = ()
    """what the run itself found wrong and stopped for."""
    checked: int = 0
    """rows whose blocks were compared with their hashes in these steps, summed over the ranks."""

    def __post_init__(self) -> None:
        _check(
            all(
                _is_count(number)
                for number in (self.segment, self.first, self.last, self.epoch, self.position)
            )
        )
        _check(
            0 < self.first <= self.last
            and len(self.samples) == len(self.contents)
            and _is_count(self.checked)
        )
        _check(all(0 <= digest < 1 << 64 for digest in (*self.samples, *self.contents)))
        _check(
            isinstance(self.faults, tuple)
            and all(isinstance(fault, str) for fault in self.faults)
        )

    @property
    def step(self) -> int:
        """The step that begins at `place`."""
        return self.first


@dataclass(frozen=True)
class SkipLine(_AuditLine):
    """Batches left out before step `before_step`, beginning at (epoch, position): those of steps `first` to `last`."""

    segment: int
    before_step: int
    first: int
    last: int
    epoch: int
    position: int
    batches: int

    def __post_init__(self) -> None:
        _check(
            all(map(_is_count, vars(self).values()))
            and 0 < self.batches <= self.last - self.first + 1
        )

    @property
    def step(self) -> int:
        """The step before which they were left out."""
        return self.before_step


Line = SegmentLine | StepsLine | SkipLine
_KINDS: dict[str, type[Line]] = {"segment": SegmentLine, "steps": StepsLine, "skip": SkipLine}
_KIND_OF: dict[type, str] = {cls: kind for kind, cls in _KINDS.items()}


@dataclass(frozen=True)
class Segment:
    """A start of the run and the valid part of it: steps up to `last_step` (None: all of them)."""

    start: SegmentLine
    lines: tuple[StepsLine | SkipLine, ...]
    last_step: int | None

    @property
    def steps(self) -> list[StepsLine]:
        """The audits among the lines."""
        return [line for line in self.lines if isinstance(line, StepsLine)]

    def valid_batches(self, line: StepsLine | SkipLine) -> int:
        """How many batches of a line are valid: those of its steps, or those left out."""
        if isinstance(line, SkipLine):
            return line.batches
        last = line.last if self.last_step is None else min(line.last, self.last_step)
        return last - line.first + 1

    def line_of(self, step: int) -> StepsLine | None:
        """The audit of a step, if it is valid."""
        return next(
            (line for line in self.steps if 0 <= step - line.first < self.valid_batches(line)),
            None,
        )

    def until(self, last_step: int) -> "Segment":
        """What remains of it after a later start has read the steps after `last_step` again."""
        last_step = last_step if self.last_step is None else min(last_step, self.last_step)
        last_step = max(last_step, self.start.first_step - 1)
        return Segment(
            self.start, tuple(line for line in self.lines if line.step <= last_step), last_step
        )


def read(path: Path) -> list[Segment]:
    """The valid history, oldest first; errors as `read_lines`."""
    return standing(read_lines(path))


def read_lines(path: Path) -> list[Line]:
    """All lines of a record, also superseded ones.

    A ConfigError without a file, a RunError for a wrong line, a DataError for an order that this release does not know.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path.parent} has no {path.name}",
            expected="the folder of a run, or for `data audit` a token store with its tokens.parts",
            fix="check the path: a run's folder is its log.dir (runs/... if none was given)",
        ) from None
    lines: list[Line] = []
    start: SegmentLine | None = None
    for number, content in enumerate(text.split("\n")[:-1], start=1):
        line = _parse(path, number, content, start)
        if isinstance(line, SegmentLine):
            lengths = line.grouped and row_lengths.stored(
                path.parent, line.grouped, line.num_rows
            )
            start = line = replace(line, lengths=lengths or None)
            check_order_version(start.order_version)
        lines.append(line)
    if not lines or not isinstance(lines[0], SegmentLine):
        raise RunError(
            f"{path} does not begin with the start of a run",
            expected="a line of kind segment, which has the order and the mesh",
            fix=_RESTORE,
        )
    return lines


def standing(lines: Sequence[Line]) -> list[Segment]:
    """The valid part of a file's lines, without segments that are superseded completely.

    A start supersedes what earlier ones have recorded of its first step and the steps after it.
    """
    segments: list[Segment] = []
    for line in lines:
        if isinstance(line, SegmentLine):
            kept = (segment.until(line.first_step - 1) for segment in segments)
            segments = [
                segment for segment in kept if segment.last_step != segment.start.first_step - 1
            ]
            segments.append(Segment(line, (), None))
        else:
            last = segments[-1]
            segments[-1] = Segment(last.start, (*last.lines, line), last.last_step)
    return segments


def _parse(path: Path, number: int, text: str, start: SegmentLine | None) -> Line:
    try:
        record = from_json(text)
        line = _KINDS[record["kind"]].from_record(record)
        if start is not None and not isinstance(line, SegmentLine):
            _check(line.step >= start.first_step)
            # A start audits at least every so many steps: more in one line mean a damaged number, and endless work.
            _check(isinstance(line, SkipLine) or line.last - line.first < start.every)
        return line
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        ThreefoldError,
    ) as error:
        raise RunError(
            f"{path}, line {number} is not what a run writes: {text[:60]!r}",
            expected="an object of kind segment, steps or skip, as the run wrote it",
            fix=_RESTORE,
        ) from error


def _as_tuple(value: Any) -> Any:
    return (
        tuple(_as_tuple(entry) for entry in value) if isinstance(value, list | tuple) else value
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _check(holds: object) -> None:
    if not holds:
        raise ValueError("a value is out of its range")
