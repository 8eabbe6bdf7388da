"""The contents of a run's rows: documents in the source's store, and their text, while the store exists. No torch."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from threefold.audit.record import Segment
from threefold.audit.stores import store_named
from threefold.config import loading
from threefold.config.paths import RUN_CONFIG, tokenizer_name
from threefold.config.schema import Config
from threefold.data.rows.known_rows import PackedRows, SourceRows, parts_of
from threefold.data.rows.packing import MixedRows, Packing
from threefold.data.store.hash_cache import known
from threefold.data.store.store import TokenStore
from threefold.data.text.listing import FILE, TEXTS
from threefold.data.tokens import Tokenizer, load_tokenizer
from threefold.errors import ThreefoldError, first_line
from threefold.jsonl import Lines
from threefold.mesh.environment import cache_folder
from threefold.records.files import MOST_BYTES

# Characters of a row's text that are shown.
SHOWN = 240
# Documents of a row that are looked for elsewhere, and others as long that each is compared with.
_COMPARED, _MOST_ALIKE = 3, 10_000


class Contents:
    """The rows that a run's record describes, opened where its stores were.

    Attributes:
        missing: why documents and texts are not known; None: they are.
    """

    def __init__(self, run: Path, segments: Sequence[Segment]) -> None:
        self._run, self._segments = run, segments
        self.missing: str | None = None
        self._has_texts = True
        try:
            self._parts = self._opened()
        except (ThreefoldError, OSError, ValueError, KeyError) as error:
            self._parts = []
            self.missing = first_line(error)

    def _opened(self) -> list[SourceRows]:
        if not self._segments or not (start := self._segments[-1].start).stores:
            raise ValueError("the run's record does not say where its data was")
        packing = Packing.of(self._config.data)
        rows = {
            name: packing.pack(_store(prefix, digest)) for name, digest, prefix in start.stores
        }
        whole = next(iter(rows.values())) if start.mixture is None else MixedRows(rows)
        if whole.fingerprint != start.data:
            raise ValueError("the data has changed since the run read it")
        return parts_of(whole)

    @cached_property
    def _config(self) -> Config:
        return loading.load(str(self._run / RUN_CONFIG), environ={}).config

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(
            tokenizer_name(self._config)[0], revision=self._config.model.revision
        )

    def _place(self, row: int) -> tuple[PackedRows, int] | None:
        """The rows of the row's source, and its number there."""
        if row < 0 or not self._parts:
            return None
        part = self._part(row)
        return part.rows, row - part.first_row

    def _part(self, row: int) -> SourceRows:
        return [each for each in self._parts if each.first_row <= row][-1]

    def documents(self, row: int) -> list[int]:
        """The documents of a row by number in its source's store; [] if they are not known."""
        if (place := self._place(row)) is None:
            return []
        rows, number = place
        return [
            int(rows.store.document_numbers[each]) for each in self._documents(rows, number)
        ]

    def files(self, row: int) -> list[str]:
        """The files of a row's documents, each once; [] where it is not known which file a document is from."""
        if row < 0 or not self._parts:
            return []
        part = self._part(row)
        paths = self._paths.get(f"data.mixture.{part.name}") or self._paths.get(
            "data.source", []
        )
        if len(paths) < 2:
            return paths
        info = part.rows.store.info
        # For files of rows, the number of documents in each is unknown.
        texts = all(path.endswith(TEXTS) for path in paths)
        if info is None or info.num_documents != len(paths) or info.num_skipped or not texts:
            return []
        return [paths[document] for document in self.documents(row)]

    @cached_property
    def _paths(self) -> dict[str, list[str]]:
        """The files that the last start read, by the key of their source."""
        paths: dict[str, list[str]] = defaultdict(list)
        for line in Lines(self._run / FILE, most_bytes=MOST_BYTES).read():
            key = line.values.get("key")
            path = line.values.get("path")
            if isinstance(key, str) and isinstance(path, str):
                paths[key].append(path)
        return paths

    def _documents(self, rows: PackedRows, number: int) -> list[int]:
        ends, documents = rows.store.document_ends, []
        for start, stop in rows.stretches(number):
            # The last token may be a label alone, the first of what follows.
            first, last = np.searchsorted(
                ends, (start, max(start, stop - 2)), side="right"
            ).tolist()
            documents += [each for each in range(first, last + 1) if each not in documents]
        return documents

    def seen(self, row: int | None) -> str | None:
        """How often a row's documents occur in their source, if one occurs there more than once."""
        if row is None or (place := self._place(row)) is None:
            return None
        store, repeats = place[0].store, []
        lengths = np.diff(store.document_ends, prepend=0)
        for document in self._documents(*place)[:_COMPARED]:
            alike = np.flatnonzero(lengths == lengths[document])[:_MOST_ALIKE].tolist()
            ends = store.document_ends
            own = store.read(int(ends[document] - lengths[document]), int(ends[document]))
            others = (
                store.read(int(ends[each] - lengths[each]), int(ends[each])) for each in alike
            )
            if (copies := sum(np.array_equal(own, other) for other in others)) > 1:
                repeats.append(
                    f"document {store.document_numbers[document]} appears {copies:,} times in its source"
                )
        return "; ".join(repeats) or None

    def text(self, row: int) -> str | None:
        """The beginning of a row's text, as it is; `visible` makes it fit to be shown. None if it is not known."""
        if (place := self._place(row)) is None or not self._has_texts:
            return None
        rows, number = place
        stretches = (
            (start, min(stop, start + 4 * SHOWN)) for start, stop in rows.stretches(number)
        )
        parts = [rows.store.read(start, stop) for start, stop in stretches]
        try:
            text = self._tokenizer.decode(np.concatenate(parts).tolist())
        except (ThreefoldError, OSError, ImportError) as error:
            self.missing = first_line(error)
            self._has_texts = False
            return None
        return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def _store(name: str, digest: str) -> TokenStore:
    """A store whose bytes are those that were read, as far as they are checked; ValueError if they are not."""
    store = store_named(name)
    hashes = known(store, cache=cache_folder())
    if hashes.change is not None or (digest and hashes.blocks.digest != digest):
        raise ValueError(f"{name}.bin and .idx have changed since the run read them")
    return store
