"""From a source to rows that can be read: the path that the loader, the audit and the commands share.

The source's token store (`store.resolve`) is cut into rows of equal length, by one of three packings (see `concat`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from threefold.data.rows.best_fit import DEFAULT_LOOKAHEAD
from threefold.data.rows.concat import ConcatRows, Rows
from threefold.data.rows.padded import PaddedRows
from threefold.data.store.resolve import open_store
from threefold.data.store.store import TokenStore
from threefold.data.text.source import Source
from threefold.data.tokens import Tokenizer
from threefold.errors import ConfigError, Problem

PACKINGS = ("concat", "best_fit", "none")


@dataclass(frozen=True)
class Packing:
    """How a store is cut into rows, in the words of the config's `data` section.

    Args:
        seq_len: tokens of a row.
        packing: `concat`, `best_fit` or `none`.
        document_mask: number the documents inside a row and begin positions again with each.
        truncate: `best_fit` and `none`: keep the first row of a longer document, drop the rest.
        lookahead: `best_fit`: pieces to choose from at a time; None: 8192.

    Raises:
        ConfigError: a setting without effect in this packing.
    """

    seq_len: int
    packing: str = "concat"
    document_mask: bool = False
    truncate: bool = False
    lookahead: int | None = None

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(
                f"data.packing = {self.packing!r} is no packing",
                expected=", ".join(PACKINGS),
                fix="--data.packing concat",
            )
        problems = []
        if self.truncate and self.packing == "concat":
            expected = "best_fit or none: concat cuts no document short"
            problems.append(_no_effect("truncate", True, self.packing, expected))
        if self.lookahead is not None and self.packing != "best_fit":
            expected = "best_fit: only it chooses among documents"
            problems.append(_no_effect("lookahead", self.lookahead, self.packing, expected))
        if problems:
            raise ConfigError.of(problems)

    def pack(self, store: TokenStore) -> Rows:
        """The rows of a store.

        Raises:
            DataError: the store gives not one row.
        """
        if self.packing == "concat":
            return ConcatRows(store, seq_len=self.seq_len, document_mask=self.document_mask)
        return PaddedRows(
            store,
            seq_len=self.seq_len,
            lookahead=(self.lookahead or DEFAULT_LOOKAHEAD) if self.packing == "best_fit" else None,
            document_mask=self.document_mask,
            truncate=self.truncate,
        )


def open_rows(source: Source, packing: Packing, *, tokenizer: Tokenizer | None, cache: Path) -> Rows:
    """Rows of a source: the store it is, or the cached store of its text (in the folder `cache`), packed.

    Raises:
        DataError: the source cannot be read, its store belongs to another tokenizer, or it gives not one row.
    """
    return packing.pack(open_store(source, tokenizer=tokenizer, cache=cache))


def _no_effect(key: str, value: object, packing: str, expected: str) -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Problem(
        f"data.{key} = {shown} has no effect with data.packing = {packing}",
        f"data.packing {expected}",
        f"remove data.{key}, or --data.packing {expected.split(':')[0].split(' ')[0]}",
    )
