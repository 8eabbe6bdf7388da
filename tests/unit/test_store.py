"""The token store: what is written is read back, the layout is the common one, and nothing half-made shows."""

from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.store import store as store_module
from threefold.data.store.index import DTYPE_OF_CODE
from threefold.data.store.store import StoreInfo, TokenStore, dtype_for
from threefold.data.store.writer import StoreWriter

FILES = (".bin", ".idx", ".blocks", ".json")


def info_of(writer: StoreWriter) -> StoreInfo:
    return StoreInfo(
        fingerprint=writer.content_hash(),
        request="r",
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        num_skipped=0,
        source="s",
        source_fingerprint="sf",
        tokenizer="bytes",
        tokenizer_fingerprint="tf",
        vocab_size=257,
        end_id=256,
    )


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> StoreInfo:
    with StoreWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_block(np.array(document, np.int64), np.array([len(document)], np.int32))
        return writer.finish(info_of)


def documents_in(store: TokenStore) -> list[list[int]]:
    return [
        part.tolist()
        for part in np.split(store.tokens, store.document_ends)[: store.num_documents]
    ]


def write_elsewhere(
    prefix: Path, sequences: list[list[float]], bounds: list[int], code: int, modes: bytes = b""
) -> None:
    """A store as another maker writes it: by hand from the format's description, no .json."""
    dtype = np.dtype(DTYPE_OF_CODE[code])
    data = np.array([token for sequence in sequences for token in sequence], dtype)
    prefix.with_suffix(".bin").write_bytes(data.tobytes())
    lengths = [len(sequence) for sequence in sequences]
    offsets = [sum(lengths[:i]) * dtype.itemsize for i in range(len(lengths))]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(bounds)}q", *bounds)
        + modes
    )


@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=20))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("store") / "tokens"
    info = write(prefix, documents)
    store = TokenStore(prefix)
    flat = [token for document in documents for token in document]
    assert store.tokens.tolist() == flat
    assert documents_in(store) == documents
    assert (
        store.document_ends.tolist()
        == np.cumsum([len(d) for d in documents], dtype=np.int64).tolist()
    )
    assert (store.num_tokens, store.num_documents) == (len(flat), len(documents))
    assert (store.info, store.fingerprint, store.end_id) == (info, info.fingerprint, 256)


def test_layout_is_byte_for_byte_the_common_one(tmp_path: Path) -> None:
    write(tmp_path / "ours", [[5, 6, 7], [], [65535]])
    write_elsewhere(tmp_path / "theirs", [[5, 6, 7], [], [65535]], [0, 1, 2, 3], 8)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


def test_index_is_the_same_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[1] * (i % 4) for i in range(11)]
    write(tmp_path / "whole", documents)
    monkeypatch.setattr("threefold.data.store.index._CHUNK", 3)
    write(tmp_path / "chunks", documents)
    assert (tmp_path / "chunks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()
    (tmp_path / "chunks.json").unlink()
    assert TokenStore(tmp_path / "chunks").num_documents == 11


@pytest.mark.parametrize("code", DTYPE_OF_CODE)
def test_reads_every_dtype_made_elsewhere(tmp_path: Path, code: int) -> None:
    write_elsewhere(tmp_path / "x", [[1, 2, 3], [4, 100]], [0, 1, 2], code)
    store = TokenStore(tmp_path / "x")
    assert store.tokens.tolist() == [1, 2, 3, 4, 100]
    assert store.tokens.dtype == np.dtype(DTYPE_OF_CODE[code])
    assert (store.info, store.end_id) == (None, None)


def test_document_of_several_sequences(tmp_path: Path) -> None:
    write_elsewhere(
        tmp_path / "x", [[1, 2], [3], [4, 5, 6], [7]], [0, 2, 2, 4], 4, modes=bytes(4)
    )
    store = TokenStore(tmp_path / "x")
    assert documents_in(store) == [[1, 2, 3], [], [4, 5, 6, 7]]


def test_fingerprint_without_json_follows_content_and_not_place(tmp_path: Path) -> None:
    write_elsewhere(tmp_path / "a", [[1, 2], [3]], [0, 1, 2], 8)
    write_elsewhere(tmp_path / "b", [[1, 2], [4]], [0, 1, 2], 8)
    write_elsewhere(tmp_path / "c", [[1], [2, 3]], [0, 1, 2], 8)
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / "moved" / f"z{suffix}")
    a, b, c, moved = (
        TokenStore(tmp_path / name).fingerprint for name in ("a", "b", "c", "moved/z")
    )
    assert a == moved
    assert len({a, b, c}) == 3


def test_fingerprint_of_a_large_store_samples_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BLOCK", 16)
    seen = set()
    for changed in (None, 0, 999):
        tokens = [7] * 1000
        if changed is not None:
            tokens[changed] = 8
        write_elsewhere(tmp_path / "x", [tokens], [0, 1], 8)
        seen.add(TokenStore(tmp_path / "x").fingerprint)
    assert len(seen) == 3


def test_pickles_as_its_prefix(tmp_path: Path) -> None:
    write(tmp_path / "x", [list(range(50_000 % 65536))])
    store = TokenStore(tmp_path / "x")
    assert len(store.tokens) and len(store.document_ends)
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    assert pickle.loads(pickled).tokens.tolist() == store.tokens.tolist()


def test_interrupted_writer_leaves_the_old_store_and_no_litter(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    with (
        pytest.raises(KeyboardInterrupt),
        StoreWriter(tmp_path / "x", dtype=np.dtype("<u2")) as writer,
    ):
        writer.add_block(np.array([2, 3]), np.array([2], np.int32))
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x.bin",
        "x.blocks",
        "x.idx",
        "x.json",
    ]
    assert TokenStore(tmp_path / "x").tokens.tolist() == [1]


def test_nothing_has_its_name_before_all_is_written(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "x", dtype=np.dtype("<u2")) as writer:
        writer.add_block(np.array([2, 3]), np.array([2], np.int32))

        def last(writer: StoreWriter) -> StoreInfo:
            assert not any((tmp_path / f"x{suffix}").exists() for suffix in FILES)
            return info_of(writer)

        writer.finish(last)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x.bin",
        "x.blocks",
        "x.idx",
        "x.json",
    ]


def test_content_hash_tells_documents_apart(tmp_path: Path) -> None:
    hashes = {
        write(tmp_path / "x", documents).fingerprint
        for documents in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]])
    }
    assert len(hashes) == 3


def test_dotted_prefix(tmp_path: Path) -> None:
    write(tmp_path / "wiki.v1.2", [[1, 2]])
    assert TokenStore(tmp_path / "wiki.v1.2").tokens.tolist() == [1, 2]


def test_dtype_by_vocabulary() -> None:
    assert [dtype_for(n).name for n in (257, 65536, 65537)] == ["uint16", "uint16", "int32"]
