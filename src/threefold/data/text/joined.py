"""Several sources, read one after the other, as one: a list in `data.source`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from threefold.data.text.source import Document, Piece, ReadLog, TextSource

# A piece's file is counted within its source, whose number is in the bits above these.
_FILE_BITS = 32


@dataclass(frozen=True)
class JoinedSources:
    """The documents of `sources`, in their order."""

    sources: tuple[TextSource, ...]

    @property
    def name(self) -> str:
        return f"[{', '.join(source.name for source in self.sources)}]"

    @property
    def text_field(self) -> str | None:
        return next((source.text_field for source in self.sources if source.text_field is not None), None)

    @property
    def labels(self) -> str | None:
        return self.sources[0].labels

    @cached_property
    def fingerprint(self) -> str:
        recipe = f"joined 1 {[source.fingerprint for source in self.sources]}"
        return hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        return [
            replace(piece, file=number << _FILE_BITS | piece.file)
            for number, source in enumerate(self.sources)
            for piece in source.pieces
        ]

    def read(self, piece: Piece, log: ReadLog) -> Iterator[Document]:
        source = self.sources[piece.file >> _FILE_BITS]
        return source.read(replace(piece, file=piece.file & (1 << _FILE_BITS) - 1), log)
