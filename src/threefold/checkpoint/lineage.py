"""What a run is: its id, where it came from, and the journal of what was done to it. No torch.

`run.json` is written once, when the folder's first start is accepted. Every checkpoint's manifest names the run, and
the start that wrote it; so a checkpoint of another run is not taken for this one's, wherever it was copied to.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from threefold.checkpoint.seal import sync, write_sealed
from threefold.config.paths import JOURNAL, RUN_FILE
from threefold.errors import ConfigError
from threefold.jsonl import Lines, cut_torn_line, utc_now


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run was forked from: where it lay, and by what it is known wherever it lies now.

    Attributes:
        run: the id of its run, if it has one.
        manifest: checksum of its manifest; None in what an earlier build wrote.
    """

    path: str
    step: int
    run: str | None
    manifest: str | None = None

    def is_same(self, other: Origin) -> bool:
        """Whether another is this checkpoint, at its place or elsewhere."""
        known = (self.step, self.run) == (other.step, other.run)
        return known and self.manifest in (None, other.manifest)


@dataclass(frozen=True)
class Identity:
    """A run's id, when it was made (UTC), and the checkpoint that it was forked from, if it was."""

    id: str
    created: str
    origin: Origin | None = None

    @classmethod
    def new(cls, origin: Origin | None = None) -> Identity:
        """The identity of a run that begins now."""
        return cls(uuid.uuid4().hex, utc_now(), origin)

    @classmethod
    def read(cls, run: Path) -> Identity | None:
        """The identity of a run's folder; None for a new one.

        Raises:
            ConfigError: the file was changed or cut.
        """
        try:
            found = json.loads((run / RUN_FILE).read_bytes())
            origin = Origin(**found["origin"]) if found["origin"] is not None else None
            known = cls(found["id"], found["created"], origin)
            texts = [known.id, known.created, *((origin.path, origin.run or "") if origin is not None else ())]
            if not all(isinstance(text, str) for text in texts) or not known.id:
                raise TypeError("a text is missing")
            return known
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{run / RUN_FILE} cannot be read: {error!r}",
                expected="the run's id, as it was written when the run began: its checkpoints name it",
                fix=f"restore {RUN_FILE} from a copy of the run; each manifest.json in {run}/checkpoints names the id",
            ) from error

    def write(self, run: Path) -> None:
        temporary = run / f".{RUN_FILE}"
        write_sealed(temporary, json.dumps(asdict(self)).encode() + b"\n")
        os.replace(temporary, run / RUN_FILE)
        sync(run)


class Journal:
    """One line for each start, stop, save, rewind and takeover of a run, on the disk before the call returns."""

    def __init__(self, run: Path) -> None:
        self._path = run / JOURNAL

    def note(self, event: str, **facts: Any) -> None:
        """As `append`, where the event itself is on the disk already: a full disk leaves the line out."""
        with suppress(OSError):
            self.append(event, **facts)

    def append(self, event: str, **facts: Any) -> None:
        cut_torn_line(self._path)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": utc_now(), **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """All lines that can be read; what was saved, the checkpoints themselves say."""
        return [line.values for line in Lines(self._path).read() if isinstance(line.values.get("event"), str)]

    @property
    def starts(self) -> int:
        """How many starts were accepted."""
        return sum(line["event"] == "start" for line in self.lines())
