"""Making a token store: documents, each ended by the end token, encoded in parallel and kept in order.

In: a text source and a tokenizer. Out: a folder with `tokens.bin`, `tokens.idx` and `tokens.json`. The source is cut
into parts, each encoded into its own file (`parts`), and the parts are joined in order at the end. So the store is the
same, byte for byte, for any number of processes, and finished parts are reused after a kill. One process makes a
folder's store while others on the machine wait; a complete store of the same content and tokenizer is reused.
Memory: one batch of a megabyte of text per process, or the longest document if that is larger.
"""

import dataclasses
import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from threefold.data.store.blocks import with_suffix
from threefold.data.store.hash_cache import known
from threefold.data.store.parts import EncodedPart, PartDone, PartMaker, plan_parts
from threefold.data.store.store import StoreInfo, TokenStore, dtype_for, read_info
from threefold.data.store.writer import StoreWriter
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import ReadLog, TextSource, log_error
from threefold.data.tokens import Tokenizer
from threefold.errors import NO_SPACE, DataError, RunError, shell_word
from threefold.mesh.environment import cache_folder, num_cores

STORE_NAME = "tokens"
PARTS = ".parts-"
"""Folder of the parts until they are joined, with the name of the request."""
MakeParts = Callable[[PartMaker, Sequence[EncodedPart]], Generator[PartDone, None, None]]
"""Makes parts, in any order."""

# Starting processes (0.5 s and more each) costs more than it saves below this much text.
_SMALL_BYTES = 64 << 20
# Part of every request's name: after a change to how documents are read, cut or encoded, old stores and parts are not
# reused. A resumed run makes its store again then, and refuses it if its content is another one.
_FORMAT = 2


@dataclass(frozen=True)
class PreparedStore:
    """A complete store on disk; `reused` if it existed already."""

    prefix: Path
    info: StoreInfo
    reused: bool

    def open(self) -> TokenStore:
        return TokenStore(self.prefix)


def prepare(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    to: Path,
    skip_bad: bool = False,
    num_workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    make: MakeParts | None = None,
    record: Callable[[PartMaker, Sequence[PartDone]], None] | None = None,
) -> PreparedStore:
    """Makes the store of a source in the folder `to`, or reuses the one there.

    Args:
        skip_bad: count lines, rows and files that cannot be read instead of refusing them.
        num_workers: processes that encode; None: one for a source below 64 MiB, else one per CPU core.
        progress: called after each part with the bytes of the source that are done, and all.
        make: makes the parts that are missing; None: `num_workers` processes of this host.
        record: gets all parts, in order, before they are joined.

    Raises:
        DataError: documents that cannot be read (named, up to ten), no text at all, or another store in `to`.
        RunError: a process was killed, or the disk is full.
    """
    if to.exists() and not to.is_dir():
        raise _no_folder(to, os.strerror(errno.ENOTDIR))
    request = request_of(source, tokenizer, skip_bad=skip_bad)
    prefix = to / STORE_NAME
    existing, untidy = found(prefix, request), _left_over(to) or any(to.glob(f"{PARTS}*"))
    if existing and not (untidy and os.access(to, os.W_OK)):
        return existing
    with _locked(to):
        for left in _left_over(to):
            left.unlink(missing_ok=True)
        # Another process may have made it while this one waited, or was killed before it had tidied up.
        if existing := found(prefix, request):
            _remove_parts(to)
            return existing
        folder = to / f"{PARTS}{request}"
        _refuse_other(prefix, request=request, begun=folder.exists())
        maker = PartMaker(source, tokenizer, folder, skip_bad)
        try:
            folder.mkdir(exist_ok=True)
            done = _make_parts(
                maker,
                plan_parts(source.pieces),
                num_workers=num_workers,
                progress=progress,
                make=make,
            )
            if record is not None:
                record(maker, done)
            info = _join(maker, done, prefix=prefix, request=request)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise RunError(
                f"no space left on the disk of {to}: {error.strerror}",
                expected="space for twice the tokens, 2 bytes each (4 for a vocabulary above 65,536): parts and store",
                fix="free space or choose another folder, then run the same command again: finished parts are reused",
            ) from error
        _remove_parts(to)
        return PreparedStore(prefix, info, reused=False)


def _left_over(to: Path) -> list[Path]:
    """Leftovers of killed processes: the writer of a store holds the folder's lock until its files have their names."""
    left = [
        file
        for kind in ("bin", "idx", "json", "parts")
        for file in to.glob(f".{STORE_NAME}.{kind}.*.tmp")
    ]
    # Readers write .blocks as well, without a lock: only that of a killed writer is known to be left.
    numbers = {file.name.split(".")[-2] for file in left}
    return left + [
        file for number in numbers for file in to.glob(f".*{STORE_NAME}.blocks.{number}.tmp*")
    ]


def _remove_parts(to: Path) -> None:
    for left in to.glob(f"{PARTS}*"):
        shutil.rmtree(left, ignore_errors=True)  # a late copy of a part may be written there


def _locked(to: Path) -> AbstractContextManager[object]:
    """The lock of a store's folder, which is made; DataError if nothing can be written there."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        return FileLock(to / ".lock").acquire()
    except OSError as error:
        raise _no_folder(to, str(error.strerror)) from error


def _no_folder(to: Path, reason: str) -> DataError:
    return DataError(
        f"{to} cannot be written: {reason}",
        expected="a folder for the tokens of the source, prepared once and read by all ranks",
        fix="XDG_CACHE_HOME=FOLDER threefold ...   (where prepared data is kept), or --to FOLDER of data prepare",
    )


def request_of(source: TextSource, tokenizer: Tokenizer, *, skip_bad: bool) -> str:
    """Name of a request: content, tokenizer and the way documents are read."""
    return content_digest(f"{_FORMAT} {source.fingerprint} {tokenizer.recipe} {skip_bad}")


def found(prefix: Path, request: str) -> PreparedStore | None:
    """The store of a request, if its bytes are as written; None if there is none, or if it was damaged since.

    As at a run's start, all of it is read if the sizes or times of its files have changed, else a sample. The cache is
    checked by its readers: a run and its audit refuse changed bytes, and repair nothing.
    """
    with suppress(DataError):
        store = TokenStore(prefix)
        if (
            store.info
            and store.info.request == request
            and (prefix.parent.name == request or not known(store, cache=cache_folder()).change)
        ):
            return PreparedStore(prefix, store.info, reused=True)
    return None


def _refuse_other(prefix: Path, *, request: str, begun: bool) -> None:
    """Refuses to overwrite another request's or another program's store, not our own unfinished or damaged one."""
    existing = [
        path
        for path in (with_suffix(prefix, s) for s in (".json", ".idx", ".bin"))
        if path.exists()
    ]
    # The cache has a folder of this name for each request.
    ours = begun or prefix.parent.name == request
    with suppress(DataError):  # a damaged record does not say whose it is
        if info := read_info(prefix):
            ours = info.request == request
    if existing and not ours:
        raise DataError(
            f"{prefix.parent} already holds another token store: {existing[0].name}",
            expected="an empty folder, or the store of the same source and the same tokenizer",
            fix=f"--to {shell_word(f'{prefix.parent}-2')}   (or remove {prefix}.bin, {prefix}.idx and {prefix}.json)",
        )


def _make_parts(
    maker: PartMaker,
    plan: Sequence[EncodedPart],
    *,
    num_workers: int | None,
    progress: Callable[[int, int], None],
    make: MakeParts | None,
) -> list[PartDone]:
    """All parts of `plan`, in order: those found from an earlier run and those made now."""
    done = {part.number: kept for part in plan if (kept := maker.finished(part))}

    def report() -> None:
        done_bytes = sum(made.part.size_bytes for made in done.values())
        progress(done_bytes, sum(part.size_bytes for part in plan))

    report()
    missing = [part for part in plan if part.number not in done]
    workers = _num_workers(num_workers, len(missing), sum(part.size_bytes for part in missing))
    made = (maker.make(part) for part in missing)
    if make is not None:
        made = make(maker, missing)
    elif workers > 1:
        from threefold.data.store.part_processes import make_in_processes

        made = make_in_processes(
            dataclasses.replace(maker, encode_at_once=1), missing, num_workers=workers
        )
    with closing(made):
        for part_done in made:
            done[part_done.part.number] = part_done
            if part_done.log.num_bad:
                break
            report()
    ordered = [done[number] for number in sorted(done)]
    _refuse_bad(maker.source, ordered)
    maker.source.refuse_changed(maker.source.pieces)
    return ordered


def _num_workers(num_workers: int | None, num_parts: int, size_bytes: int) -> int:
    if multiprocessing.current_process().daemon:
        return 1  # a daemonic process cannot have children
    if num_workers is None:
        num_workers = 1 if size_bytes < _SMALL_BYTES else num_cores()
    return min(max(num_workers, 1), num_parts)


def _refuse_bad(source: TextSource, done: Sequence[PartDone]) -> None:
    log = ReadLog()
    for part_done in done:
        log.merge(part_done.log)
    if log.num_bad or (
        source.text_field is not None and log.num_rows and not log.num_with_field
    ):
        raise log_error(source, log)
    num_documents = sum(d.num_documents for d in done)
    if source.loss_mask is not None and not num_documents:
        raise _wrong_mask(
            source, f"none of {log.num_rows:,} rows, {log.num_skipped:,} of them skipped"
        )
    if sum(d.num_tokens for d in done) == num_documents:
        counts = f"empty documents: {num_documents:,}, skipped: {log.num_skipped:,}"
        raise DataError(
            f"data.source = {source.name!r} contains no text ({counts})",
            expected="at least one document with text",
            fix="--data.source PATH   (a file or folder with text)",
        )


def _refuse_whole(source: TextSource, writer: StoreWriter) -> None:
    """Refuses a loss mask that distinguishes nothing: no token, or every token of rows with prompts."""
    if source.loss_mask is None:
        return
    if not writer.num_loss_tokens:
        raise _wrong_mask(source, f"no token of {writer.num_tokens:,}")
    if writer.num_loss_tokens == writer.num_tokens and source.loss_mask.train_on != "all":
        raise _wrong_mask(source, f"all of its {writer.num_tokens:,} tokens")


def _wrong_mask(source: TextSource, what: str) -> DataError:
    return DataError(
        f"data.source = {source.name!r}, {source.loss_mask}: {what} would be trained on",
        expected="prompts, which are not trained on, and answers, which are",
        fix="threefold data show --data.source SOURCE --data.tokenizer TOKENIZER   shows why; if all of it is meant: "
        "--data.train_on all",
    )


def _join(
    maker: PartMaker, done: Sequence[PartDone], *, prefix: Path, request: str
) -> StoreInfo:
    tokenizer, source, mask = maker.tokenizer, maker.source, maker.source.loss_mask
    log = ReadLog()
    for part_done in done:
        log.merge(part_done.log)
    with StoreWriter(prefix, dtype=dtype_for(tokenizer.vocab_size)) as writer:
        for part_done in done:
            writer.add_block(*maker.read(part_done))
        _refuse_whole(source, writer)
        return writer.finish(
            lambda made: made.info(
                tokenizer,
                mask,
                request=request,
                num_skipped=log.num_skipped,
                source=source.name,
                source_fingerprint=source.fingerprint,
                bos_id=tokenizer.bos_id if mask is None else None,
                pairs=True if mask is not None and mask.has_pairs else None,
                lost_texts=log.lost or None,
            )
        )
