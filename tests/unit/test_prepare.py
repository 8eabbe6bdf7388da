"""Making a store: the documents' tokens in order, the same for any number of processes and after any interruption."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from filelock import FileLock

from threefold.data.store import parts, prepare
from threefold.data.store.blocks import Blocks
from threefold.data.store.open_source import cached_store, open_text
from threefold.data.store.part_processes import make_in_processes
from threefold.data.store.prepare import PreparedStore, request_of
from threefold.data.store.store import TokenStore
from threefold.data.text.source import Piece, ReadLog, Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError, RunError

BYTES = ByteTokenizer()


class CountingBytes(ByteTokenizer):
    """The byte tokenizer, noting what it encoded; fails, or kills its process, at a chosen document."""

    def __init__(self, *, stop_at: str | None = None, kill: bool = False) -> None:
        self.seen: list[str] = []
        self.stop_at = stop_at
        self.kill = kill

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        for text in texts:
            if text == self.stop_at:
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt
        self.seen.extend(texts)
        return super().encode_batch(texts)


class BlockedSignals:
    """In place of what makes parts: the signals that reach its process when it begins to."""

    def make(self, part: Any) -> Any:
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 documents in 20 parts of two files each, small enough to look at."""
    monkeypatch.setattr(parts, "PART_BYTES", 20)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i:02}")
    return folder


def make(
    corpus: Path, to: Path, tokenizer: ByteTokenizer = BYTES, **options: Any
) -> PreparedStore:
    return prepare.prepare(open_text(Source(str(corpus))), tokenizer, to=to, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file; of the hashes, which also have the files' times, the digest."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    for name in found.keys() & {"tokens.blocks"}:
        kept = Blocks.read(folder / name)
        assert kept is not None and kept.unchanged(folder / "tokens")
        found[name] = f"{kept.digest} {kept.min_id} {kept.max_id}".encode()
    return found


def texts_of(source: Path) -> list[str]:
    text, log = open_text(Source(str(source))), ReadLog()
    return [document for piece in text.pieces for document in text.read(piece, log)]


def documents_in(store: TokenStore) -> list[list[int]]:
    return [
        part.tolist()
        for part in np.split(store.tokens, store.document_ends)[: store.num_documents]
    ]


def test_store_is_each_document_and_the_end_token(corpus: Path, tmp_path: Path) -> None:
    made = make(corpus, tmp_path / "to")
    store = made.open()
    texts = texts_of(corpus)
    assert documents_in(store) == [[*text.encode(), 256] for text in texts]
    assert store.dtype == np.uint16
    assert sorted(contents(tmp_path / "to")) == [
        "tokens.bin",
        "tokens.blocks",
        "tokens.idx",
        "tokens.json",
    ]
    assert (made.info.tokenizer, made.info.vocab_size, made.info.end_id) == ("bytes", 257, 256)
    assert (made.info.num_documents, made.info.num_tokens, made.reused) == (40, 40 * 12, False)


def test_processes_make_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        make(corpus, tmp_path / str(workers), num_workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_processes_read_every_kind_of_a_list(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    (tmp_path / "b.csv").write_text("id,text\n1,three\n")
    asked = Source((str(tmp_path / "b.csv"), str(corpus), str(tmp_path / "*.gz")))
    made = [
        prepare.prepare(open_text(asked), BYTES, to=tmp_path / str(n), num_workers=n)
        for n in (1, 3)
    ]
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    texts = ["three", *texts_of(corpus), "one", "two"]
    assert documents_in(made[1].open()) == [[*text.encode(), 256] for text in texts]
    assert made[1].info.source == f"[{tmp_path}/b.csv, {corpus}, {tmp_path}/*.gz]"


def test_part_size_does_not_show_in_the_store(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(corpus, tmp_path / "small")
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)
    make(corpus, tmp_path / "large")
    assert contents(tmp_path / "small") == contents(tmp_path / "large")


@pytest.mark.parametrize("limit", ["_BATCH_DOCUMENTS", "_BATCH_CHARACTERS"])
def test_batches_do_not_show_in_the_store(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    make(corpus, tmp_path / "whole")
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(parts, limit, 30)
    made = make(corpus, tmp_path / "batches")
    assert made.info.num_tokens == 480 and not made.reused
    assert contents(tmp_path / "batches") == contents(tmp_path / "whole")


@pytest.mark.parametrize("stop", [0, 1, 17, 39])
def test_interrupted_it_goes_on_where_it_stopped(
    corpus: Path, tmp_path: Path, stop: int
) -> None:
    make(corpus, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(corpus, tmp_path / "to", CountingBytes(stop_at=f"document {stop:02}"))
    assert not (tmp_path / "to" / "tokens.json").exists()
    again = CountingBytes()
    make(corpus, tmp_path / "to", again)
    # Two documents a part: the part that was interrupted is encoded again, those before it are not.
    assert again.seen == [f"document {i:02}" for i in range(stop // 2 * 2, 40)]
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")


class Writing(CountingBytes):
    """Writes to a file when it meets a text, as another program may at any time."""

    def __init__(self, at: str, file: Path, text: str) -> None:
        super().__init__()
        self.at, self.file, self.text = at, file, text

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        if self.at in texts:
            self.file.write_text(self.text)
        return super().encode_batch(texts)


@pytest.mark.parametrize("changed", ["21", "30"])
def test_file_that_changes_while_it_is_read_is_named_and_no_store_is_kept(
    corpus: Path, tmp_path: Path, changed: str
) -> None:
    """The file of the part that is being read, or one that is read later."""
    file = corpus / f"{changed}.txt"
    with pytest.raises(DataError) as raised:
        make(corpus, tmp_path / "to", Writing("document 20", file, "document XX"))
    (problem,) = raised.value.problems
    assert problem.what == f"{file} has changed, or is gone, since its fingerprint was made"
    assert not (tmp_path / "to" / "tokens.json").exists()


def test_parts_of_a_killed_preparation_are_used_for_equal_bytes_alone(
    corpus: Path, tmp_path: Path
) -> None:
    """What was there for a while, and is gone, is in no part: parts have the bytes that the fingerprint is of."""
    make(corpus, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(corpus, tmp_path / "to", CountingBytes(stop_at="document 20"))
    stat = (corpus / "03.txt").stat()
    for text in ("document XX", "document 03"):
        (corpus / "03.txt").write_text(text)
    os.utime(corpus / "03.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = CountingBytes()
    make(corpus, tmp_path / "to", again)
    assert again.seen[0] == "document 20"
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")


def test_a_damaged_part_is_made_again(corpus: Path, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(corpus, tmp_path / "to", CountingBytes(stop_at="document 10"))
    (folder,) = (tmp_path / "to").glob(".parts-*")
    (folder / "00001.bin").write_bytes(b"cut")
    (folder / "00002.json").write_bytes(b"{")
    again = CountingBytes()
    make(corpus, tmp_path / "to", again)
    assert again.seen[:4] == [f"document {i:02}" for i in (2, 3, 4, 5)]
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")


def test_killed_process_ends_the_work_and_keeps_the_finished_parts(
    corpus: Path, tmp_path: Path
) -> None:
    make(corpus, tmp_path / "whole")
    with pytest.raises(RunError, match="ended while it encoded part 10"):
        make(
            corpus,
            tmp_path / "to",
            CountingBytes(stop_at="document 20", kill=True),
            num_workers=2,
        )
    (folder,) = (tmp_path / "to").glob(".parts-*")
    assert len(list(folder.glob("*.json"))) >= 9
    make(corpus, tmp_path / "to")
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")


def test_error_in_a_process_travels_back(corpus: Path, tmp_path: Path) -> None:
    (corpus / "20.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"20\.txt is not UTF-8"):
        make(corpus, tmp_path / "to", num_workers=2)


def test_bad_lines_are_counted_when_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\nnope\n{"text": "b"}\n')
    made = make(tmp_path / "x.jsonl", tmp_path / "to", skip_bad=True)
    assert (made.info.num_documents, made.info.num_skipped) == (2, 1)
    # The strict request is another one: the store that left lines out does not pass for it.
    with pytest.raises(DataError, match="already holds another token store"):
        make(tmp_path / "x.jsonl", tmp_path / "to")


def test_progress_counts_up_to_the_whole(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make(corpus, tmp_path / "to", progress=lambda *each: seen.append(each))
    assert seen == [(done, 440) for done in range(0, 441, 22)]


def test_whole_store_is_used_again(corpus: Path, tmp_path: Path) -> None:
    make(corpus, tmp_path / "to")
    again = CountingBytes()
    made = make(corpus, tmp_path / "to", again)
    assert made.reused and not again.seen


def test_cache_is_named_by_content_and_tokenizer(corpus: Path, tmp_path: Path) -> None:
    source = open_text(Source(str(corpus)))
    first = cached_store(source, BYTES, cache=tmp_path / "cache")
    assert not first.reused and cached_store(source, BYTES, cache=tmp_path / "cache").reused
    (corpus / "00.txt").write_text("changed")
    changed = cached_store(open_text(Source(str(corpus))), BYTES, cache=tmp_path / "cache")
    assert not changed.reused and changed.prefix != first.prefix
    assert changed.info.fingerprint != first.info.fingerprint
    assert first.prefix.parent.name == request_of(source, BYTES, skip_bad=False)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": (".bin", lambda data: data[:3]),
    "a bit": (".bin", lambda data: data[:9] + bytes([data[9] ^ 4]) + data[10:]),
    "another file of this size": (".bin", lambda data: bytes(len(data))),
    "bounds": (".idx", lambda data: data[:-8] + bytes(8)),
    "hashes": (".blocks", lambda data: data[:-1]),
    "no JSON": (".json", lambda data: data[:9]),
    "brackets": (".json", lambda data: b"[" * 100_000),
}


@pytest.mark.parametrize("kept_times", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_store_is_made_again(
    corpus: Path, tmp_path: Path, damage: str, kept_times: bool
) -> None:
    """One in the cache if it cannot be opened: what was changed in it, its readers compare and refuse."""
    source = open_text(Source(str(corpus)))

    def prepared() -> PreparedStore:
        if damage in ("no JSON", "brackets", "cut"):
            return cached_store(source, BYTES, cache=tmp_path / "cache")
        return make(corpus, tmp_path / "to")

    made = prepared()
    whole = contents(made.prefix.parent)
    suffix, change = DAMAGE[damage]
    file = made.prefix.with_suffix(suffix)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(change(file.read_bytes()))
    if kept_times:
        os.utime(file, ns=times)
    assert not prepared().reused
    assert contents(made.prefix.parent) == whole
    assert prepared().reused


def test_store_with_other_times_is_read_and_used_again(corpus: Path, tmp_path: Path) -> None:
    """As a copy has; without its hashes, its tokens are compared with its fingerprint."""
    made = make(corpus, tmp_path / "to")
    for path in (tmp_path / "to").iterdir():
        os.utime(path, ns=(1, 1))
    assert make(corpus, tmp_path / "to").reused
    made.prefix.with_suffix(".blocks").unlink()
    assert make(corpus, tmp_path / "to").reused


def test_a_record_that_cannot_be_read_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    """Whose store it is, nobody knows; the fix leads on."""
    made = make(corpus, tmp_path / "to")
    made.prefix.with_suffix(".json").write_bytes(b"{")
    with pytest.raises(DataError, match="already holds another token store") as refused:
        make(corpus, tmp_path / "to")
    for path in re.findall(r"\S+tokens\.\w+", refused.value.problems[0].fix):
        Path(path.rstrip(",)")).unlink()
    assert not make(corpus, tmp_path / "to").reused


def test_same_tokens_elsewhere_have_the_same_fingerprint(corpus: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts_of(corpus))
    (tmp_path / "x.jsonl").write_text(rows)
    assert (
        make(corpus, tmp_path / "a").info.fingerprint
        == make(tmp_path / "x.jsonl", tmp_path / "b").info.fingerprint
    )


class CountingFolder(ByteTokenizer):
    """Leaves a file for each batch it encodes: counts over processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        (self.folder / f"{texts[0]} {os.getpid()} {time.monotonic_ns()}").touch()
        return super().encode_batch(texts)


def _open_cached(corpus: Path, cache: Path, counted: Path, barrier: Any, results: Any) -> None:
    source = open_text(Source(str(corpus)))
    barrier.wait(30)
    made = cached_store(source, CountingFolder(counted), cache=cache)
    results.put((made.reused, made.open().num_tokens))


def test_one_process_makes_it_while_the_others_wait(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    (tmp_path / "counted").mkdir()
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (corpus, tmp_path / "cache", tmp_path / "counted", barrier, results)
    processes = [
        context.Process(target=_open_cached, args=arguments, daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    answers = sorted(results.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(30)
    assert answers == [(False, 480), (True, 480), (True, 480)]
    # The spawned processes know nothing of the small parts of this test: all documents are one batch.
    assert len(list((tmp_path / "counted").iterdir())) == 1


def _prepare_slowly(corpus: Path, to: Path) -> None:
    parts.PART_BYTES = 20
    prepare.prepare(
        open_text(Source(str(corpus))),
        CountingBytes(stop_at="document 30", kill=True),
        to=to,
        num_workers=1,
    )


def test_killed_outright_it_goes_on_where_it_stopped(corpus: Path, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_slowly, args=(corpus, tmp_path / "to")
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    again = CountingBytes()
    make(corpus, tmp_path / "to", again)
    assert again.seen == [f"document {i:02}" for i in range(30, 40)]
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")


def _join_and_die(corpus: Path, to: Path) -> None:
    prepare.StoreWriter.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    make(corpus, to)


def test_files_of_a_killed_preparation_are_removed(corpus: Path, tmp_path: Path) -> None:
    """Killed while it joined the parts, it leaves the store a second time, and no lock."""
    make(corpus, tmp_path / "whole")
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(
            target=_join_and_die, args=(corpus, tmp_path / "to")
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert len(list((tmp_path / "to").glob(".tokens.bin.*.tmp"))) == 1
    make(corpus, tmp_path / "to")
    assert contents(tmp_path / "to") == contents(tmp_path / "whole")
    # Those beside a whole store as well: of an earlier release, or of a process killed at the very end.
    for name in (".tokens.json.17.tmp", ".tokens.blocks.17.tmp", ".tokens.blocks.18.tmp"):
        (tmp_path / "to" / name).touch()
    (tmp_path / "to" / ".parts-0").mkdir()
    assert make(corpus, tmp_path / "to").reused
    # The last may be of a reader, which needs no lock.
    assert sorted(contents(tmp_path / "to")) == sorted(
        [".tokens.blocks.18.tmp", *contents(tmp_path / "whole")]
    )


def test_files_of_a_living_preparation_stay(corpus: Path, tmp_path: Path) -> None:
    to, waiting = tmp_path / "to", threading.Event()
    to.mkdir()
    with FileLock(to / ".lock"):
        (to / f".tokens.bin.{os.getpid()}.tmp").touch()
        other = threading.Thread(target=lambda: (waiting.set(), make(corpus, to)))
        other.start()
        waiting.wait(30)
        other.join(0.3)
        assert other.is_alive() and (to / f".tokens.bin.{os.getpid()}.tmp").exists()
    other.join(30)
    assert not other.is_alive() and not list(to.glob(".tokens.bin.*.tmp"))


def test_parts_hold_all_pieces_in_order() -> None:
    pieces = [
        Piece(i, 0, size, size) for i, size in enumerate([5, 0, 1 << 30, 7 << 20, 1 << 20, 3])
    ]
    plan = parts.plan_parts(pieces)
    assert [piece for part in plan for piece in part.pieces] == pieces
    assert [part.number for part in plan] == list(range(len(plan)))
    assert [len(part.pieces) for part in plan] == [3, 2, 1]
    assert (
        len(parts.plan_parts([Piece(0, i, i + 1, 8 << 20) for i in range(100_000)]))
        <= parts.MAX_PARTS + 1
    )


def test_joined_documents_end_with_the_end_token() -> None:
    ids: Iterable[list[int]] = ([1, 2], [], [3])
    tokens, lengths = parts.joined(
        [np.array(a, np.uint8) for a in ids], end_id=9, dtype=np.dtype("<u2")
    )
    assert (tokens.tolist(), lengths.tolist()) == ([1, 2, 9, 9, 3, 9], [3, 1, 2])


def test_documents_of_one_file_larger_than_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 50)
    monkeypatch.setattr("threefold.data.text.rows._PIECE_BYTES", 30)
    texts = [f"{i} " * (i % 7) for i in range(60)]
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    make(tmp_path / "x.jsonl", tmp_path / "to", num_workers=2)
    store = TokenStore(tmp_path / "to" / "tokens")
    assert [bytes(document[:-1]).decode() for document in documents_in(store)] == texts


def test_an_interrupt_reaches_no_process_that_begins_to_encode() -> None:
    """From its first import on: else a terminal's Ctrl-C shows a traceback of each."""
    makers: Any = make_in_processes(BlockedSignals(), [None], num_workers=1)  # type: ignore[arg-type, list-item]
    assert [signal.SIGINT in blocked for blocked in makers] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
