"""What of the evaluation a run is trained on, found before its first step, and kept by the bytes of both."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import parts_of
from threefold.data.store.overlap import Match, Overlap, overlap

# Some seconds on one core; `threefold data overlap` reads everything.
_MOST = 1 << 27
_NAMED = 3


def overlaps(
    rows: Rows, held_out: Rows, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Overlap]:
    """What of each source of the evaluation is trained on, all of it by name."""
    training = {part.name: part.rows.store for part in parts_of(rows)}
    for part in parts_of(held_out):
        yield overlap(training, part.rows.store, progress=progress)


def overlaps_at_start(rows: Rows, held_out: Rows, *, cache: Path) -> list[Overlap]:
    """As `overlaps`, in bounded time, with some documents by name; the same bytes are not read again."""
    training = {part.name: part.rows.store for part in parts_of(rows)}
    known = [(part.name, part.blocks.digest, part.rows.store.fingerprint) for part in parts_of(rows)]
    found = []
    for part in parts_of(held_out):
        recipe = repr((1, _MOST, known, part.blocks.digest, part.rows.store.fingerprint))
        place = cache / "overlap" / f"{hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()}.json"
        try:
            values = json.loads(place.read_text())
            matches = {name: [Match(*each) for each in values[name]] for name in ("exact", "alike")}
            found.append(Overlap(**{**values, **matches}))
        except (OSError, ValueError, TypeError, KeyError):
            found.append(overlap(training, part.rows.store, most=_MOST, named=_NAMED))
            with contextlib.suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(asdict(found[-1])))
    return found
