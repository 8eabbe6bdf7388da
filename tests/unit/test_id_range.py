"""The range of a store's ids: recorded when it is written, else read once and remembered, never of another .bin."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from threefold.data.store import id_range as module
from threefold.data.store.id_range import SUFFIX, check_ids, id_range
from threefold.data.store.index import write_index
from threefold.data.store.prepare import prepare
from threefold.data.store.resolve import open_text
from threefold.data.store.store import TokenStore
from threefold.data.text.source import Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each reading of a whole store."""
    seen: list[int] = []
    scanned = module._scanned

    def counted(tokens: np.ndarray) -> tuple[int, int]:
        seen.append(len(tokens))
        return scanned(tokens)

    monkeypatch.setattr(module, "_scanned", counted)
    return seen


def foreign(prefix: Path, tokens: list[int]) -> TokenStore:
    values = np.array(tokens, "<i4")
    prefix.with_suffix(".bin").write_bytes(values.tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        write_index(file, np.array([len(tokens)], np.int32), dtype=values.dtype)
    return TokenStore(prefix)


def ends(store: TokenStore, cache: Path) -> tuple[int, int]:
    found = id_range(store, cache=cache)
    return found.min_id, found.max_id


def test_written_store_records_its_range(tmp_path: Path, scans: list[int]) -> None:
    (tmp_path / "a.txt").write_text("abcz")
    made = prepare(open_text(Source(str(tmp_path / "a.txt"))), ByteTokenizer(), to=tmp_path / "st")
    assert len(scans) == 1
    assert ends(made.open(), tmp_path / "cache") == (ord("a"), 256)
    assert len(scans) == 1 and not (tmp_path / "cache").exists()


def test_store_of_another_maker_is_read_once(tmp_path: Path, scans: list[int]) -> None:
    store = foreign(tmp_path / "x", [7, 3, 900])
    assert [ends(store, tmp_path), ends(TokenStore(tmp_path / "x"), tmp_path)] == [(3, 900), (3, 900)]
    assert scans == [3]
    check_ids(store, vocab_size=901, cache=tmp_path)
    with pytest.raises(DataError, match="has the id 900 as token 2, in document 0"):
        check_ids(store, vocab_size=900, cache=tmp_path)


def test_folder_that_cannot_be_written(tmp_path: Path, scans: list[int]) -> None:
    store, cache = foreign(tmp_path / "x", [7, 3, 900]), tmp_path / "cache"
    (tmp_path / f"x{SUFFIX}").mkdir()  # a superuser may write everywhere, but not over a folder
    assert [ends(store, cache), ends(store, cache)] == [(3, 900), (3, 900)]
    assert scans == [3] and len(list((cache / "ids").iterdir())) == 1
    other = foreign(tmp_path / "y", [1])
    assert ends(other, cache) == (1, 1)


@pytest.mark.parametrize("tokens", [[7, 3, -1], [1, 2, 3, 4]], ids=["as large", "larger"])
def test_changed_store_is_read_again(tmp_path: Path, scans: list[int], tokens: list[int]) -> None:
    assert ends(foreign(tmp_path / "x", [7, 3, 900]), tmp_path) == (3, 900)
    store = foreign(tmp_path / "x", tokens)
    os.utime(tmp_path / "x.bin", ns=(1 << 62, 1 << 62))
    assert ends(store, tmp_path) == (min(tokens), max(tokens))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "threefold-ids-1"}', '{"format": "2"}'])
def test_damaged_record_is_made_again(tmp_path: Path, scans: list[int], text: str) -> None:
    store = foreign(tmp_path / "x", [7, 3, 900])
    (tmp_path / f"x{SUFFIX}").write_text(text)
    assert [ends(store, tmp_path), ends(store, tmp_path)] == [(3, 900), (3, 900)]
    assert scans == [3]
