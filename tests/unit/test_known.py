"""The known bytes of a store: hashed when written, else once; every change is named with its block, or is harmless."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import KnownRows, parts_of
from threefold.data.rows.packing import MixedRows, Packing, check_ids, open_rows
from threefold.data.store import blocks as blocks_module
from threefold.data.store import hash_cache as module
from threefold.data.store.blocks import SUFFIX, Blocks
from threefold.data.store.hash_cache import known
from threefold.data.store.index import write_index
from threefold.data.store.open_source import open_text
from threefold.data.store.prepare import prepare
from threefold.data.store.store import TokenStore
from threefold.data.text.source import Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError

BLOCK = 64
LATER = 1 << 62
SETTINGS = (
    Packing(8),
    Packing(8, document_mask=True),
    Packing(8, "best_fit", document_mask=True),
    Packing(8, "none"),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by one with each reading of a whole store."""
    seen: list[Path] = []
    hashed_store = module.hashed_store

    def counted(store: TokenStore) -> Blocks:
        seen.append(store.prefix)
        return hashed_store(store)

    monkeypatch.setattr(module, "hashed_store", counted)
    return seen


def foreign(prefix: Path, *documents: list[int]) -> TokenStore:
    values = np.array([token for document in documents for token in document], "<i4")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(values.tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        write_index(
            file,
            np.array([len(document) for document in documents], np.int32),
            dtype=values.dtype,
        )
    return TokenStore(prefix)


def prepared(folder: Path, seed: int = 0) -> Path:
    """The prefix of a store of 12 documents, made from text."""
    words, text = random.Random(seed), folder.with_name(f"{folder.name}-text")
    text.mkdir(parents=True)
    for number in range(12):
        (text / f"{number:02}.txt").write_text("".join(words.choices("abcdef ", k=30 + number)))
    return prepare(open_text(Source(str(text))), ByteTokenizer(), to=folder).prefix


def rows_at(prefix: Path, cache: Path, packing: Packing = SETTINGS[0]) -> Rows:
    return open_rows(Source(str(prefix)), packing, tokenizer=None, cache=cache)


def range_of(store: TokenStore, cache: Path) -> tuple[int, int]:
    found = known(store, cache=cache)
    assert found.change is None
    return found.blocks.min_id, found.blocks.max_id


def test_written_store_is_known(tmp_path: Path, passes: list[Path]) -> None:
    prefix = prepared(tmp_path / "st")
    assert range_of(TokenStore(prefix), tmp_path / "cache") == (ord(" "), 256)
    rows_at(prefix, tmp_path / "cache")
    assert not passes and not (tmp_path / "cache").exists()
    found = Blocks.read(prefix.with_suffix(SUFFIX))
    again = module.hashed_store(TokenStore(prefix))
    assert found is not None and found.files == again.files and found.digest == again.digest


def test_store_of_another_maker_is_read_once(tmp_path: Path, passes: list[Path]) -> None:
    store = foreign(tmp_path / "x", [7, 3, 900])
    assert [range_of(store, tmp_path), range_of(TokenStore(tmp_path / "x"), tmp_path)] == [
        (3, 900),
        (3, 900),
    ]
    assert len(passes) == 1
    blocks = known(store, cache=tmp_path).blocks
    check_ids(store, blocks, vocab_size=901)
    with pytest.raises(DataError, match="has the id 900 as token 2, in document 0"):
        check_ids(store, blocks, vocab_size=900)


def test_folder_that_cannot_be_written(tmp_path: Path, passes: list[Path]) -> None:
    store, cache = foreign(tmp_path / "x", [7, 3, 900]), tmp_path / "cache"
    (tmp_path / f"x{SUFFIX}").mkdir()  # a superuser may write everywhere, but not over a folder
    assert [range_of(store, cache), range_of(store, cache)] == [(3, 900), (3, 900)]
    assert len(passes) == 1 and len(list((cache / "blocks").iterdir())) == 1
    assert range_of(foreign(tmp_path / "y", [1]), cache) == (1, 1)


def test_copy_with_other_times_is_read_once_and_is_the_same(
    tmp_path: Path, passes: list[Path]
) -> None:
    prefix = prepared(tmp_path / "st")
    before = known(TokenStore(prefix), cache=tmp_path).blocks.digest
    for path in prefix.parent.iterdir():
        os.utime(path, ns=(LATER, LATER))
    assert [known(TokenStore(prefix), cache=tmp_path).blocks.digest for _ in range(2)] == [
        before
    ] * 2
    assert len(passes) == 1


def test_store_without_hashes_is_compared_with_its_fingerprint(tmp_path: Path) -> None:
    prefix = prepared(tmp_path / "st")
    prefix.with_suffix(SUFFIX).unlink()
    rows_at(prefix, tmp_path)
    prefix.with_suffix(SUFFIX).unlink()
    data = bytearray(prefix.with_suffix(".bin").read_bytes())
    data[100] ^= 1
    prefix.with_suffix(".bin").write_bytes(data)
    with pytest.raises(
        DataError, match=r"tokens.bin and .idx are not what tokens.json describes"
    ):
        rows_at(prefix, tmp_path)


def test_change_is_named_with_its_block_and_rows(tmp_path: Path) -> None:
    foreign(tmp_path / "x", list(range(100)))
    rows_at(tmp_path / "x", tmp_path)
    values = np.arange(100, dtype="<i4")
    values[40] = 7
    (tmp_path / "x.bin").write_bytes(values.tobytes())
    with pytest.raises(DataError) as raised:
        rows_at(tmp_path / "x", tmp_path)
    # Block 2 has the tokens 32 to 47; row 3 ends with the label 32.
    assert str(raised.value) == (
        f"{tmp_path}/x.bin has changed since it was hashed: block 2 of 7 (bytes 128 to 191), read by "
        "rows 3, 4, 5\n"
        "  expected: the bytes as they were hashed: x.blocks has a hash of each block\n"
        f"  fix: copy its files again from their origin; if they were changed on purpose: rm {tmp_path}/x.blocks"
    )
    (tmp_path / "x.blocks").unlink()
    rows_at(tmp_path / "x", tmp_path)


def test_cached_store_is_made_again_as_the_error_says(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    source = Source(str(tmp_path / "a.txt"))

    def opened() -> Rows:
        return open_rows(
            source, Packing(8), tokenizer=ByteTokenizer(), cache=tmp_path / "cache"
        )

    path = parts_of(opened())[0].rows.store.prefix.with_suffix(".bin")
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=f"fix: rm -r {path.parent}   "):
        opened()
    shutil.rmtree(path.parent)
    opened()


@pytest.mark.parametrize("packing", SETTINGS, ids=str)
def test_readers_are_the_rows_whose_tokens_lie_there(tmp_path: Path, packing: Packing) -> None:
    lengths = [1, 3, 9, 20, 8, 17, 2, 5]
    store = foreign(tmp_path / "x", *(list(range(length)) for length in lengths))
    part = parts_of(packing.pack(store))[0].rows
    read = [
        set(range(start, stop))
        for row in range(part.num_rows)
        for start, stop in part.stretches(row)
    ]
    by_row = [
        set[int]().union(*(set(range(*s)) for s in part.stretches(row)))
        for row in range(part.num_rows)
    ]
    assert set().union(*read) <= set(range(sum(lengths)))
    for start in range(0, sum(lengths), 3):
        expected = [
            row for row, tokens in enumerate(by_row) if tokens & set(range(start, start + 5))
        ]
        assert part.readers(start, start + 5).tolist() == expected


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


EDITS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip,
    flip,
    flip,
    cut,
    extend,
    remove,
)


def everything(rows: Rows) -> list[list[int]]:
    return [values.ravel().tolist() for values in rows.rows(np.arange(rows.num_rows)).values()]


@pytest.mark.parametrize("kind", ["prepared", "foreign"])
def test_edits_are_named_or_harmless(tmp_path: Path, kind: str) -> None:
    """300 damaged copies of a store, half of them with the times that the files had."""
    rng = random.Random(7)
    names = {"good": 1, "other": 2}
    for name, seed in names.items():
        prefix = prepared(tmp_path / name, seed)
        if kind == "foreign":
            prefix.with_suffix(".json").unlink()
            prefix.with_suffix(SUFFIX).unlink()
        rows_at(prefix, tmp_path)
    files = sorted(
        path.name
        for path in (tmp_path / "good").iterdir()
        if path.suffix and path.name != ".lock"
    )
    assert len(files) == (4 if kind == "prepared" else 3)
    good = {
        packing: rows_at(tmp_path / "good/tokens", tmp_path, packing) for packing in SETTINGS
    }
    whole, prints = (
        {packing: everything(rows) for packing, rows in good.items()},
        {r.fingerprint for r in good.values()},
    )
    named = 0
    for number in range(300):
        folder, packing = tmp_path / f"copy-{number}", SETTINGS[number % len(SETTINGS)]
        shutil.copytree(tmp_path / "good", folder)
        path = folder / rng.choice(files)
        stat = path.stat()
        if rng.random() < 0.2:
            shutil.copy(tmp_path / "other" / path.name, path)
        else:
            rng.choice(EDITS)(path, rng)
        if path.exists() and rng.random() < 0.5:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        try:
            rows = rows_at(folder / "tokens", tmp_path / f"cache-{number}", packing)
            found = everything(rows)
        except DataError as error:
            assert str(folder) in str(error) or "no file in this folder" in str(error), error
            named += 1
        else:
            # Without a .json it is another program's store, which has no end token and another fingerprint.
            foreign_now = path.suffix == ".json" and not path.exists()
            assert found == whole[packing] or (
                foreign_now and rows.fingerprint not in prints
            ), (number, path.name)
        shutil.rmtree(folder)
    assert named > 200


def test_rows_that_were_read_are_checked_on_the_disk(tmp_path: Path) -> None:
    a = rows_at(foreign(tmp_path / "a", list(range(100))).prefix, tmp_path)
    b = rows_at(foreign(tmp_path / "b", list(range(300))).prefix, tmp_path, Packing(8))
    mixed = MixedRows({"a": a, "b": b})
    everyone, checker = np.arange(mixed.num_rows), KnownRows(mixed)
    assert checker.check(everyone, within_s=60) == (mixed.num_rows, None)
    assert checker.check(everyone, within_s=0) == (1, None)
    with (tmp_path / "b.bin").open("r+b") as file:
        file.seek(400)
        file.write(b"\xff")
    untouched = np.setdiff1d(everyone, a.num_rows + parts_of(b)[0].rows.readers(96, 112))
    assert checker.check(untouched, within_s=60) == (len(untouched), None)
    _, found = checker.check(everyone, within_s=60)
    assert found is not None
    assert checker.describe(found) == (
        f"{tmp_path}/b.bin has changed since it was hashed: block 6 of 19 (bytes 384 to 447), read by "
        f"rows {', '.join(str(a.num_rows + row) for row in (11, 12, 13))}"
    )
    os.truncate(tmp_path / "b.bin", 640)
    _, found = checker.check(everyone[-1:], within_s=0)
    assert found is not None
    cut_at = "b.bin was cut, to 640 bytes instead of 1,200: block 10 of 19 and all after it, read by rows "
    assert cut_at in checker.describe(found)
    with pytest.raises(DataError, match="was truncated while being read"):
        b.rows(np.array([b.num_rows - 1]))
