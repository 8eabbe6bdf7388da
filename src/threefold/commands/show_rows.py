"""Rows as text, with the trained tokens marked: the documents of a source, or the packed rows that a run reads."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import typer

from threefold.arrays import Array, Bool
from threefold.audit import record
from threefold.audit.record import Segment
from threefold.config import loading
from threefold.config.schema import Config
from threefold.data.chat.labeller import labeller_for
from threefold.data.rows.concat import IGNORED, PADDING, Rows
from threefold.data.rows.known_rows import parts_of, reasons_text, why_cut
from threefold.data.store.open_source import open_store, open_text, store_prefix
from threefold.data.store.store import TokenStore, lost_summary, starts_of
from threefold.data.text.source import (
    SIDES,
    KnownText,
    Labelled,
    LossMask,
    ReadLog,
    Source,
    TextSource,
    log_error,
    no_end_warning,
)
from threefold.data.tokens import Tokenizer, byte_backend, for_texts, spelled_out
from threefold.errors import ConfigError, RunError, shell_word, visible
from threefold.mesh.environment import cache_folder
from threefold.run.sources import tokenizer_of, with_packing

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

COUNTED = 1000
_BAR = 40


class Shown(NamedTuple):
    """One row: ids, whether each is trained on, and the document of each inside the row (-1: padding), [tokens] each.

    `pairs`: its documents 2k and 2k + 1 are a pair, the chosen one and the rejected one. `lost`: texts of the row that
    the chat template does not write, by kind. `texts`: all its texts, of each document.
    """

    row: int
    ids: Array
    loss_mask: Bool
    documents: Array
    pairs: bool = False
    lost: Mapping[str, int] | None = None
    texts: Sequence[Sequence[KnownText]] = ()

    @property
    def sides(self) -> list[str]:
        """Which side of a pair each document is; [] without pairs."""
        count = int(self.documents.max(initial=-1)) + 1 if self.pairs else 0
        return [SIDES[number % 2] for number in range(count)]


def rows_of_source(
    source: Source, tokenizer: Tokenizer, row: int | None
) -> tuple[Iterator[Shown], Tokenizer]:
    """The documents of a source, or one of them; of a source of pairs, the pairs."""
    pairs, documents = documents_of(source, tokenizer)
    together = zip(*[documents] * (2 if pairs else 1), strict=True)
    numbered = islice(enumerate(together), row or 0, None if row is None else row + 1)

    def shown(number: int, parts: Sequence[Labelled]) -> Shown:
        ids, loss_mask = (
            np.concatenate(each)
            for each in zip(*((p.ids, p.loss_mask) for p in parts), strict=True)
        )
        inside = np.repeat(np.arange(len(parts)), [len(part.ids) for part in parts])
        lost = sum((Counter(part.lost) for part in parts), Counter())
        return Shown(
            number, ids, loss_mask, inside, pairs, lost, [part.texts for part in parts]
        )

    return (shown(*each) for each in numbered), tokenizer


def documents_of(source: Source, tokenizer: Tokenizer) -> tuple[bool, Iterator[Labelled]]:
    """Whether documents are pairs, and the documents of a source or store. Errors as when it is prepared."""
    if isinstance(source.name, str) and store_prefix(source.name) is not None:
        store = open_store(source, tokenizer=tokenizer, cache=cache_folder())
        mask, documents = store.loss_mask, _documents_of_store(store)
    else:
        text = open_text(source, labeller_for(source, tokenizer))
        mask, documents = text.loss_mask, _documents_of_text(text, source, tokenizer)
    warn_of_no_end(mask, source.labels.chat_template or tokenizer.name)
    return mask is not None and mask.has_pairs, documents


def _documents_of_store(store: TokenStore) -> Iterator[Labelled]:
    begin = 0
    for end in store.document_ends.tolist():
        mask = (
            store.trained_on(begin, end)
            if store.has_loss_mask
            else np.ones(end - begin, np.bool_)
        )
        yield Labelled(store.read(begin, end).astype(np.int32), mask)
        begin = end


def _documents_of_text(
    text: TextSource, source: Source, tokenizer: Tokenizer
) -> Iterator[Labelled]:
    """All tokens of a text are trained on."""
    own = for_texts(tokenizer, source.labels)
    log = ReadLog(skip_bad=source.skip_bad_lines)
    for piece in text.pieces:
        for document in text.read(piece, log):
            if log.num_bad:
                break
            if isinstance(document, str):
                tokens = np.append(own.encode_batch([document])[0], tokenizer.end_id).astype(
                    np.int32
                )
                document = Labelled(tokens, np.ones(len(tokens), np.bool_))
            yield document
        if log.num_bad:
            raise log_error(text, log)
    if text.text_field is not None and log.num_rows and not log.num_with_field:
        raise log_error(text, log)


def warn_of_no_end(mask: LossMask | None, template: str) -> None:
    """Prints a warning if the chat template writes no token that ends an answer."""
    if mask is not None and mask.end == "missing":
        typer.echo(no_end_warning(template), err=True)


def run_rows(run: Path, row: int | None) -> tuple[Iterator[Shown], Tokenizer]:
    """The packed rows of a run, or one of them."""
    rows, tokenizer = rows_of_run(run, record.read(run / record.FILE))
    for mask in {part.rows.store.loss_mask for part in parts_of(rows)}:
        warn_of_no_end(mask, tokenizer.name)
    wanted = range(rows.num_rows) if row is None else range(rows.num_rows)[row : row + 1]
    return (packed_row(rows, each) for each in wanted), tokenizer


def packed_row(rows: Rows, row: int) -> Shown:
    """One packed row. The label of its last token, and of a piece that was cut, is a token of another place."""
    read = {name: values[0] for name, values in rows.rows(np.array([row], np.int64)).items()}
    ids = read["input_ids"]
    labels = read["labels"]
    documents = read["document_ids"]
    loss_mask = np.zeros(len(ids), np.bool_)
    # Where documents meet, the label may be a token of a piece that was cut.
    loss_mask[1:] = (labels[:-1] == ids[1:]) & (documents[:-1] == documents[1:])
    (part, *_) = parts_of(rows)
    return Shown(row, ids, loss_mask, documents, part.rows.store.has_pairs)


def json_lines(rows: Iterator[Shown]) -> Iterator[str]:
    for each in rows:
        values = {
            name: getattr(each, name).tolist() for name in ("ids", "loss_mask", "documents")
        }
        more: dict[str, Any] = {"sides": each.sides} if each.pairs else {}
        more |= {"lost_texts": dict(each.lost)} if each.lost else {}
        texts = [
            {"document": document, **text._asdict(), "in_rendering": text.reason is None}
            for document, own in enumerate(each.texts)
            for text in own
        ]
        more |= {"texts": texts} if texts else {}
        yield json.dumps({"row": each.row, **values, **more})


def text_lines(
    rows: Iterator[Shown], tokenizer: Tokenizer, *, show: int, ids: bool, count: bool
) -> Iterator[str]:
    counts: list[tuple[int, int]] = []
    plain = []
    for number, each in enumerate(islice(rows, max(show, COUNTED) if count else 1)):
        tokens = int(np.count_nonzero(each.documents >= 0))
        counts.append((tokens, int(np.count_nonzero(each.loss_mask))))
        if number < show:
            yield from _row(each, tokenizer, counts[-1], ids=ids)
        if not any(each.texts):
            plain.append(each.ids)
    if plain and (spelled := spelled_out(tokenizer, np.concatenate(plain))):
        yield f"warning: {spelled}"
    if count and counts:
        yield from histogram(counts)


def _row(
    each: Shown, tokenizer: Tokenizer, counts: tuple[int, int], *, ids: bool
) -> Iterator[str]:
    padding = f", {len(each.ids) - counts[0]:,} of padding" if counts[0] < len(each.ids) else ""
    lost = f"; {lost_summary(each.lost)}" if each.lost else ""
    yield f"row {each.row}: {counts[0]:,} tokens, {counts[1]:,} trained on{padding}{lost}"
    for text in (text for own in each.texts for text in own if text.reason is not None):
        where = "" if text.message is None else f"messages[{text.message}] ({text.role}): "
        yield f"  lost, {text.reason}: {where}{text.kind}" + (
            f": {visible(repr(text.text))}" if text.text else ""
        )
    several = len(np.unique(each.documents[each.documents >= 0])) > 1
    for document in np.unique(each.documents[each.documents >= 0]):
        inside = each.documents == document
        if each.pairs:
            count = int(np.count_nonzero(each.loss_mask[inside]))
            side = each.sides[document]
            yield f"  document {document}, {side}: {np.count_nonzero(inside):,} tokens, {count:,} trained on"
        elif several:
            yield f"  document {document}:"
        shown = marked(
            each.ids[inside].tolist(), each.loss_mask[inside].tolist(), decoder_of(tokenizer)
        )
        yield from (f"  | {line}" for line in shown.removesuffix("\n").split("\n"))
        if ids:
            pairs = zip(each.ids[inside].tolist(), each.loss_mask[inside].tolist(), strict=True)
            yield "  ids " + " ".join(
                f"[{id}]" if trained_on else str(id) for id, trained_on in pairs
            )


def marked(
    ids: Sequence[int], loss_mask: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of tokens, with those that are trained on in colour on a terminal, else in [[ ]]."""
    parts, shown, end = [], "", 0
    for trained_on, group in groupby(loss_mask):
        begin, end = end, end + len(list(group))
        # Decoders treat the beginning of a text differently: the preceding tokens are decoded too.
        whole = decode(ids[:end])
        text = whole[len(shown) :] if whole.startswith(shown) else decode(ids[begin:end])
        shown = whole
        text = visible(text)  # a text's escape sequences would be the terminal's own
        if trained_on and sys.stdout.isatty():
            lines = (
                typer.style(line, fg=typer.colors.GREEN, bold=True) if line else ""
                for line in text.split("\n")
            )
            text = "\n".join(lines)
        elif trained_on:
            text = f"[[{text}]]"
        parts.append(text)
    return "".join(parts)


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Ids as text, with special tokens."""
    backend = getattr(tokenizer, "backend", None) or byte_backend()
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))


def histogram(counts: Sequence[tuple[int, int]]) -> Iterator[str]:
    """How many rows have how many tokens that are trained on, of (tokens, those trained on) a row."""
    tokens, trained_on = (sum(each) for each in zip(*counts, strict=True))
    share = f"{100 * trained_on / max(1, tokens):.1f} %"
    yield f"the first {len(counts):,} rows: {tokens:,} tokens, {trained_on:,} trained on ({share})"
    sizes = [each.bit_length() for _, each in counts]
    most = max(sizes.count(size) for size in set(sizes))
    for size in range(min(sizes), max(sizes) + 1):
        low = (1 << size) >> 1
        high = max(0, (1 << size) - 1)
        number = sizes.count(size)
        name = f"{low:,} to {high:,}" if low < high else f"{low:,}"
        yield f"  {name:>20} trained on: {number:>5,} rows  {'#' * -(-_BAR * number // most)}".rstrip()


def ledger_lines(run: Path) -> Iterator[str]:
    """For each document of a run: its tokens, those trained on, and these after packing; then the sums.

    Raises:
        ConfigError: every token of all documents is trained on.
        RunError: the rows have another number of labels than their documents keep.
    """
    rows, _ = rows_of_run(run, record.read(run / record.FILE))
    parts = [part for part in parts_of(rows) if part.rows.store.has_loss_mask]
    if not parts:
        raise ConfigError(
            f"--rows: every token of the documents of {run} is trained on",
            expected="a run on conversations, or on prompts and answers",
            fix="leave --rows out",
        )
    for part in parts:
        ends = part.rows.store.document_ends
        starts = starts_of(ends)
        trained_on = part.rows.store.count_trained_on(starts, ends)
        kept = part.rows.targets_of_documents()
        numbers = part.rows.store.document_numbers.tolist()
        why = why_cut(part.rows)
        in_how_many, _ = part.rows.spans_of_documents()
        for at, number in enumerate(numbers):
            tokens, wanted, left = (int(each[at]) for each in (ends - starts, trained_on, kept))
            split = f"; split over {in_how_many[at]} rows" if in_how_many[at] > 1 else ""
            reasons = {reason: int(each[at]) for reason, each in why.items()}
            yield f"{part.name} {_ledger(f'document {number}', tokens, wanted, left, reasons)}{split}"
        # As the run reads them: the labels themselves, counted.
        read = (part.rows.rows(np.array([row])) for row in range(part.rows.num_rows))
        in_rows = sum(int(np.count_nonzero(each["labels"] != IGNORED)) for each in read)
        if int(kept.sum()) != in_rows:
            raise RunError(
                f"the rows of {part.name} have {in_rows:,} labels, and its documents keep {int(kept.sum()):,}",
                expected="each token that is trained on once, or cut off",
                fix=f"threefold data audit {shell_word(run)} --contents   compares the bytes of the source",
            )
        sums = {reason: int(each.sum()) for reason, each in why.items()}
        info = part.rows.store.info
        name = f"{part.name}, {len(ends):,} documents"
        skipped = (
            f"; {info.num_skipped:,} lines, rows or files skipped"
            if info is not None and info.num_skipped
            else ""
        )
        yield _ledger(name, int(ends[-1]), int(trained_on.sum()), in_rows, sums) + skipped


def _ledger(name: str, tokens: int, trained_on: int, kept: int, why: Mapping[str, int]) -> str:
    cut = f", {trained_on - kept:,} cut off ({reasons_text(why)})" if kept < trained_on else ""
    return (
        f"{name}: trained on: {trained_on:,} of {tokens:,} tokens; after packing: {kept:,}{cut}"
    )


def texts_of_rows(
    run: Path, segments: Sequence[Segment], indices: Sequence[int]
) -> Iterator[str]:
    """The texts of some rows of a run, without special tokens."""
    rows, tokenizer = rows_of_run(run, segments)
    for index in indices:
        row = rows.rows(np.array([index], np.int64))
        tokens = row["input_ids"][0][row["document_ids"][0] != PADDING]
        yield f"row {index}:"
        yield from (
            f"  | {line}" for line in visible(tokenizer.decode(tokens.tolist())).splitlines()
        )


def sides_of(config: Config) -> tuple[Rows, Rows]:
    """The rows that a config trains on, and those that it evaluates on."""
    from threefold.run import assemble

    mesh, tokenizer = _one_process(), tokenizer_of(config)
    config = with_packing(config, mesh)
    training, held_out = (
        assemble.rows_of(config, tokenizer, mesh, held_out=held_out)
        for held_out in (False, True)
    )
    return training, held_out


def _one_process() -> "Mesh":
    # Opening a run's data imports torch.
    import torch

    from threefold.mesh.mesh import Mesh
    from threefold.mesh.topology import Topology

    return Mesh(Topology(), 0, torch.device("cpu"))


def rows_of_run(run: Path, segments: Sequence[Segment]) -> tuple[Rows, Tokenizer]:
    """The rows that a run reads and their tokenizer; RunError if the source has changed since the run."""
    from threefold.run import assemble

    config = loading.load(str(run / "config.yaml"), environ={}).config
    tokenizer = tokenizer_of(config)
    rows = assemble.rows_of(config, tokenizer, _one_process())
    recorded = segments[-1].start.data
    if rows.fingerprint != recorded:
        raise RunError(
            f"the source of {run}/config.yaml has the fingerprint {rows.fingerprint}, but the run has read {recorded}",
            expected="the unchanged source: its rows now have different tokens or numbers",
            fix="restore the source, or run this command in the folder in which the run was started",
        )
    return rows, tokenizer
