"""The identity of a run: its id, its origin, the chain of its starts, and the journal of operations on it. No torch.

`run.json` is written when the folder's first start is accepted, and extended by each start, which holds the checksum of
the one before. Every checkpoint's manifest names the run and the start that wrote it, by its number and its checksum
(`link`). So neither a checkpoint of another run nor one of a copy that has continued by itself is taken for this one's,
wherever it is.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from threefold.checkpoint.seal import checksum_of, sync
from threefold.config.paths import JOURNAL, RUN_FILE
from threefold.errors import ConfigError
from threefold.jsonl import (
    Lines,
    Values,
    cut_torn_line,
    from_json,
    open_file,
    utc_now,
    write_whole,
)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run was forked from: where it was, and what identifies it wherever it is now.

    Attributes:
        run: the id of its run, if it has one.
        manifest: checksum of its manifest; None if that cannot be read.
    """

    path: str
    step: int
    run: str | None
    manifest: str | None

    def is_same(self, other: Origin) -> bool:
        """Whether another is this checkpoint, at its place or elsewhere."""
        return replace(self, path="") == replace(other, path="")


@dataclass(frozen=True)
class Start:
    """A start of a run, as a link of its chain.

    Attributes:
        before: checksum of the start before; of the first, of the run's id.
        step: the last step done before it (0: none).
        resumed: checksum of the manifest that it resumed from; None: it began at step 1.
        nonce: random: two copies of a run may make otherwise equal starts.
    """

    before: str
    step: int
    resumed: str | None
    nonce: str

    @property
    def link(self) -> str:
        """Its checksum, which the next start and the manifests of its checkpoints hold."""
        return checksum_of(json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class Author:
    """Who wrote a checkpoint: the run's id, the number of its start (0: an import) and that start's checksum."""

    run: str
    start: int
    link: str

    @classmethod
    def of(cls, manifest: Values) -> Author | None:
        """From a manifest; None if no run wrote it."""
        match manifest:
            case {"run": str(run), "start": int(start), "link": str(link)}:
                return cls(run, start, link)
        return None


@dataclass(frozen=True)
class Identity:
    """A run's id, when it was made (UTC), the checkpoint that it was forked from, if it was, and its starts.

    Attributes:
        program: its loop is a program's own (`threefold.Run`), which alone can continue it.
    """

    id: str
    created: str
    origin: Origin | None = None
    starts: tuple[Start, ...] = ()
    program: bool = False

    @classmethod
    def new(cls, origin: Origin | None = None, *, program: bool = False) -> Identity:
        """The identity of a run that begins now."""
        return cls(uuid.uuid4().hex, utc_now(), origin, program=program)

    def begin(self, step: int, resumed: str | None) -> Identity:
        """Returns the identity with one more start."""
        return replace(
            self,
            starts=(*self.starts, Start(self.author.link, step, resumed, uuid.uuid4().hex)),
        )

    @property
    def author(self) -> Author:
        """The newest start, as what it writes names it."""
        return Author(self.id, len(self.starts), self._link(len(self.starts)))

    def has(self, author: Author) -> bool:
        """Whether an author is one of this run's starts: of a copy, only those before the two parted are."""
        same_run = author.run == self.id and 0 <= author.start <= len(self.starts)
        return same_run and author.link == self._link(author.start)

    def stands(self, author: Author, step: int) -> bool:
        """Whether a step of one of its starts is part of what the run is now: no later start went back before it."""
        return all(start.step >= step for start in self.starts[author.start :])

    def _link(self, number: int) -> str:
        return self.starts[number - 1].link if number else checksum_of(self.id.encode())

    @classmethod
    def read(cls, run: Path) -> Identity | None:
        """The identity of a run's folder; None for a new one.

        Raises:
            ConfigError: the file was changed or cut.
        """
        try:
            with open_file(run / RUN_FILE) as file:
                return cls.of(from_json(file.read()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{run / RUN_FILE} cannot be read: {error!r}",
                expected="the run's id, as it was written when the run began: its checkpoints name it",
                fix=f"restore {RUN_FILE} from a copy of the run; each manifest.json in {run}/checkpoints names the id",
            ) from error

    @classmethod
    def of(cls, values: Values) -> Identity:
        """The identity of plain values; ValueError, KeyError or TypeError if they are none or the chain is broken."""
        origin = Origin(**values["origin"]) if values["origin"] is not None else None
        starts = tuple(Start(**start) for start in values["starts"])
        identity = cls(
            values["id"], values["created"], origin, starts, bool(values.get("program"))
        )
        texts = [
            identity.id,
            identity.created,
            *((origin.path, origin.run or "") if origin is not None else ()),
        ]
        if not all(isinstance(text, str) for text in texts) or not identity.id:
            raise TypeError("a text is missing")
        for number, start in enumerate(identity.starts):
            if type(start.step) is not int or start.before != identity._link(number):
                raise ValueError(f"its start {number + 1} does not follow from the one before")
        return identity

    def write(self, run: Path) -> None:
        write_whole(run / RUN_FILE, [json.dumps(asdict(self)).encode(), b"\n"])
        sync(run)


@dataclass(frozen=True)
class Ending:
    """How a start of a run ended, if it neither did its last step nor stopped as asked: by the first error.

    Attributes:
        how: signal, exit, asked (it did not end as it was), gone (its process), lost (its connection), stall, worker,
            memory, device, disk, data, numbers, error (one of ours), exception (any other).
        ranks: those that failed; empty: all of them, or it is unknown which.
        host: of the first of them.
        code: the number of the signal, or the exit code.
        phase, step: where the first of them was, by the watchdog; 0: before its first step.
        rows: the numbers of the rows that it had read for the step, if known.
        error: its text, for people.
        at: the calls that failed, the innermost last.
        memory_kills: processes that the kernel ended meanwhile because memory ran out.
    """

    how: str
    ranks: tuple[int, ...] = ()
    host: str = ""
    code: int = 0
    phase: str = ""
    step: int = 0
    rows: tuple[int, ...] = ()
    error: str = ""
    at: str = ""
    memory_kills: int = 0

    @classmethod
    def of(cls, values: Values) -> Ending | None:
        """From a line of the journal; None if that is damaged."""
        blank = asdict(cls(""))
        taken: dict[str, Any] = {name: values.get(name) for name in blank}
        sound = [type(each) for each in taken.values()] == [
            type(each) for each in json.loads(json.dumps(blank)).values()
        ]
        if not sound or {type(number) for number in (*taken["ranks"], *taken["rows"], 0)} != {
            int
        }:
            return None
        return cls(**taken | {"ranks": tuple(taken["ranks"]), "rows": tuple(taken["rows"])})


class Journal:
    """One line for each start, stop, save, rewind and ending of a run, on the disk before the call returns."""

    def __init__(self, run: Path) -> None:
        self._path = run / JOURNAL

    def note(self, event: str, **facts: Any) -> None:
        """As `append`, where the event itself is on the disk already: a full disk leaves the line out."""
        with suppress(OSError):
            self.append(event, **facts)

    def end(self, ending: Ending) -> None:
        """Notes how a start ended; beside the logs where it ended before the folder became a run's."""
        folder = self._path.parent
        (self if (folder / RUN_FILE).exists() else Journal(folder / "logs")).note(
            "ending", **asdict(ending)
        )

    def append(self, event: str, **facts: Any) -> None:
        cut_torn_line(self._path)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": utc_now(), **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """All lines that can be read; what was saved, the checkpoints themselves say."""
        return [
            line.values
            for line in Lines(self._path).read()
            if isinstance(line.values.get("event"), str)
        ]

    def endings(self) -> list[dict[str, Any]]:
        """The lines of endings, with those from before the folder was a run's."""
        lines = [*Journal(self._path.parent / "logs").lines(), *self.lines()]
        return [line for line in lines if line["event"] == "ending"]

    def starts(self) -> list[Values]:
        """The lines of accepted starts."""
        return [line for line in self.lines() if line["event"] == "start"]

    def chain(self) -> list[Values]:
        """Its starts, as in run.json."""
        names = [entry.name for entry in fields(Start)]
        return [{name: line.get(name) for name in names} for line in self.starts()]
