"""From sources to rows that can be read: the path that the loader, the audit and the commands share.

A source's token store (`store.open_source`) is cut into rows of equal length, by one of three packings: `concat`, or
complete documents, one to a row (`none`) or as many as fit (`best_fit`), both in `best_fit.py`. The rows of several
sources have one numbering: first all rows of the first source, then of the second, and so on, as in
`Mixture.rows_at`. So a reader of rows does not know that there are several sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from threefold.arrays import Array, Indices
from threefold.config.schema import DataConfig
from threefold.data.rows.best_fit import PLACEMENTS, PaddedRows
from threefold.data.rows.concat import ConcatRows, PackingReport, RowArrays, Rows, checked
from threefold.data.rows.known_rows import PackedRows, parts_of, problem_of
from threefold.data.store.blocks import OF_TOKENS, Blocks, with_suffix
from threefold.data.store.hash_cache import known
from threefold.data.store.held_out import StoreSide
from threefold.data.store.open_source import open_store
from threefold.data.store.store import TokenStore
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import Source
from threefold.data.tokens import Tokenizer
from threefold.errors import ConfigError, DataError, Problem, ThreefoldError

PACKINGS = ("concat", *PLACEMENTS)


@dataclass(frozen=True)
class Packing:
    """How a store is cut into rows, with the keys of the config's `data` section.

    Args:
        seq_len: tokens of a row.
        packing: `concat`, `best_fit` or `none`; None: `best_fit` for a store with a loss mask, else `concat`.
        document_mask: number the documents inside a row and restart positions with each.
        truncate: `best_fit` and `none`: keep the first row of a longer document, drop the rest.
        eval_share, seed: of the documents, how many are held out, and the seed that chooses them.
        held_out: those are packed, and not the others.

    Raises:
        ConfigError: a setting that has no effect with this packing.
    """

    seq_len: int
    packing: str | None = "concat"
    document_mask: bool = False
    truncate: bool = False
    eval_share: float = 0.0
    seed: int = 0
    held_out: bool = False

    def __post_init__(self) -> None:
        if self.packing not in (*PACKINGS, None):
            raise ConfigError(
                f"data.packing = {self.packing!r} is not a packing",
                expected=", ".join(PACKINGS),
                fix="--data.packing concat",
            )
        if self.truncate and self.packing == "concat":
            raise ConfigError(
                "data.truncate = true has no effect with data.packing = concat",
                expected="data.packing best_fit or none: concat truncates no document",
                fix="remove data.truncate, or --data.packing best_fit",
            )

    @classmethod
    def of(cls, data: DataConfig) -> "Packing":
        """The packing that a config asks for."""
        mask, share = bool(data.document_mask), data.eval_share
        return cls(
            data.seq_len, data.packing, mask, data.truncate, share, data.seed if share else 0
        )

    def pack(self, store: TokenStore) -> Rows:
        """The rows of a store, or of one side of it.

        Raises:
            DataError: it gives not one.
            ConfigError: it has pairs, which cannot be packed so, or nothing is trained on in any of its rows.
        """
        if not self.eval_share:
            return self._packed(store)
        side = StoreSide(store, self.eval_share, self.seed, self.held_out)
        try:
            return self._packed(side)
        except ThreefoldError as error:
            where = "holds out" if self.held_out else "leaves to train on"
            what = f"data.eval_share = {self.eval_share:g} {where} {side.num_documents:,} documents"
            raise type(error).of(
                replace(each, what=f"{what}: {each.what}") for each in error.problems
            ) from error

    def _packed(self, store: TokenStore) -> Rows:
        packing = self.packing or ("best_fit" if store.has_loss_mask else "concat")
        if store.has_pairs:
            self._refuse_for_pairs(packing)
        if packing == "concat":
            rows: PackedRows = ConcatRows(
                store, seq_len=self.seq_len, document_mask=self.document_mask
            )
        else:
            rows = PaddedRows(
                store,
                seq_len=self.seq_len,
                placement=PLACEMENTS[packing],
                document_mask=self.document_mask,
                truncate=self.truncate,
            )
        if store.has_loss_mask and not rows.num_targets.any():
            longest = f"--data.seq_len {int(np.diff(store.document_ends, prepend=0).max())}   (of the longest document"
            raise ConfigError(
                f"data.source has no token that is trained on in any of its {rows.num_rows:,} rows: all are cut off "
                f"(data.seq_len = {self.seq_len}, data.truncate = {str(self.truncate).lower()})",
                expected="rows that reach an answer: a mean loss over no tokens is not a number",
                fix=f"{longest}{', or --data.truncate false' * self.truncate})",
            )
        return rows

    def _refuse_for_pairs(self, packing: str) -> None:
        cut = "best_fit or none: concat cuts answers anywhere"
        seen = "true: two answers in a row must not attend to each other"
        ConfigError.raise_for(
            Problem(
                f"data.{key} = {value} with pairs of answers (preference)",
                f"data.{key} {expected}",
                f"leave data.{key} out, or --data.{key} {fix}",
            )
            for key, value, expected, fix, wrong in (
                ("packing", "concat", cut, "best_fit", packing == "concat"),
                ("document_mask", "false", seen, "true", not self.document_mask),
            )
            if wrong
        )


def open_rows(
    source: Source,
    packing: Packing,
    *,
    tokenizer: Tokenizer | None,
    cache: Path,
    vocab_size: int | None = None,
) -> Rows:
    """The packed rows of a source's store, which text has in the folder `cache`; errors as for all three functions.

    Its bytes are compared with their hashes (`known`): a DataError names the block that has changed and its rows.

    Args:
        vocab_size: of the model that reads them; None: the ids are not checked.
    """
    store = open_store(source, tokenizer=tokenizer, cache=cache)
    store.blocks, store.blocks_at, change = known(store, cache=cache)
    if change is not None:
        # The documents' bounds are right if their file is: then the rows of a block can be named.
        rows = packing.pack(store) if change.suffix in OF_TOKENS else None
        raise DataError.of(
            [problem_of(store, change, cast("PackedRows | None", rows), cache=cache)]
        )
    if vocab_size is not None:
        check_ids(store, store.blocks, vocab_size=vocab_size)
    return packing.pack(store)


def store_at(rows: Rows) -> tuple[str, str | None]:
    """(prefix, where its hashes are) of the store that `open_rows` has opened, from which `reopen_rows` does again."""
    (part,) = parts_of(rows)
    store = part.rows.store
    return str(store.prefix), str(store.blocks_at) if store.blocks_at is not None else None


def reopen_rows(prefix: str, blocks_at: str | None, packing: Packing, *, cache: Path) -> Rows:
    """The rows that `open_rows` has opened and compared with their hashes on this host, without doing that again."""
    store = TokenStore(prefix)
    place = Path(blocks_at) if blocks_at is not None else None
    store.blocks, store.blocks_at = Blocks.read(place) if place is not None else None, place
    if store.blocks is None:
        store.blocks = known(store, cache=cache).blocks
    return packing.pack(store)


class MixedRows:
    """Rows of several sources, read by one number."""

    def __init__(self, parts: Mapping[str, Rows]) -> None:
        """Number the rows of `parts`, which have one length; their order is part of the numbering."""
        self.parts = dict(parts)
        self._rows = list(self.parts.values())
        self._ends = np.cumsum([part.num_rows for part in self._rows], dtype=np.int64)
        self.num_rows = int(self._ends[-1])
        self.seq_len = self._rows[0].seq_len
        assert {part.seq_len for part in self._rows} == {self.seq_len}

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each source, by name."""
        return {name: part.num_rows for name, part in self.parts.items()}

    @cached_property
    def fingerprint(self) -> str:
        recipe = repr([(name, part.fingerprint) for name, part in self.parts.items()])
        return content_digest(recipe)

    @cached_property
    def report(self) -> PackingReport:
        reports = [part.report for part in self._rows]
        sums = {
            field.name: sum(getattr(report, field.name) for report in reports)
            for field in fields(PackingReport)
        }
        padding = sum(report.padding_share * report.num_rows for report in reports)
        return PackingReport(**{**sums, "padding_share": padding / self.num_rows})

    def locate(self, row: int) -> tuple[str, int]:
        """(name of the source, number of the row in it) of one row."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        return list(self.parts)[part], row - (int(self._ends[part]) - self._rows[part].num_rows)

    def rows(self, indices: Indices) -> RowArrays:
        """As `Rows.rows`; each source is asked once."""
        wanted = checked(indices, self.num_rows)
        part_of = np.searchsorted(self._ends, wanted, side="right")
        batch: RowArrays = {}
        for number in np.unique(part_of):
            part = self._rows[number]
            mine = np.flatnonzero(part_of == number)
            read = part.rows(wanted[mine] - (self._ends[number] - part.num_rows))
            for name, values in read.items():
                # values: (rows of this source, seq_len)
                batch.setdefault(name, np.empty((len(wanted), *values.shape[1:]), np.int64))[
                    mine
                ] = values
        return batch


# Ids that are looked at together.
_CHUNK = 1 << 24


def check_ids(store: TokenStore, blocks: Blocks, *, vocab_size: int) -> None:
    """DataError if a store has an id below 0, or one that a model of `vocab_size` has no embedding for.

    Under tensor parallelism an id that no rank has would be trained in silence: its embedding is zero and its target is
    never hit. The range of the ids was found with the store's hashes (`known`), in the same pass.
    """
    path = with_suffix(store.prefix, ".bin")
    if store.dtype.kind == "f":
        raise DataError(
            f"{path} holds numbers of type {store.dtype.name}",
            expected="token ids, which are whole numbers; these would be truncated",
            fix="threefold data prepare --data.source TEXT --data.tokenizer TOKENIZER --to DIR   (makes a new store)",
        )
    if blocks.min_id >= 0 and blocks.max_id < vocab_size:
        return
    tokens = store.tokens
    place = _first_outside(tokens, vocab_size)
    document = int(np.searchsorted(store.document_ends, place, "right"))
    raise DataError(
        f"{path} has the id {int(tokens[place])} as token {place:,}, in document {document:,} "
        f"(both counted from 0); its ids are {blocks.min_id} to {blocks.max_id}",
        expected=f"ids from 0 to {vocab_size - 1}: the model's vocabulary has {vocab_size} of them",
        fix="prepare the text again with the model's tokenizer, or use the model that the store was made for",
    )


def _first_outside(tokens: Array, vocab_size: int) -> int:
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK].astype(np.int64)
        if len(outside := np.flatnonzero((part < 0) | (part >= vocab_size))):
            return start + int(outside[0])
    raise AssertionError("no id is outside")
