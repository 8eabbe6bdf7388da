"""From the name of a source to rows: prepared stores as they are, text through the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from threefold.data.rows.best_fit import PaddedRows
from threefold.data.rows.concat import ConcatRows
from threefold.data.rows.packing import Packing, open_rows
from threefold.data.store.open_source import open_store, open_text, store_prefix
from threefold.data.store.prepare import prepare
from threefold.data.text.source import Source
from threefold.data.tokens import ByteTokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(name * 20)
    return folder


def test_text_goes_through_the_cache(text: Path, tmp_path: Path) -> None:
    rows = open_rows(Source(str(text)), Packing(10), tokenizer=BYTES, cache=tmp_path / "cache")
    assert isinstance(rows, ConcatRows)
    assert rows.store.prefix.is_relative_to(tmp_path / "cache")
    stream = [*b"a" * 20, 256, *b"b" * 20, 256, *b"c" * 20, 256]
    assert rows.rows(np.arange(6))["input_ids"].ravel().tolist() == stream[:60]
    again = open_rows(Source(str(text)), Packing(10), tokenizer=BYTES, cache=tmp_path / "cache")
    assert again.fingerprint == rows.fingerprint


def test_prepared_folder_prefix_and_files_are_the_same_rows_as_the_text(
    text: Path, tmp_path: Path
) -> None:
    to = tmp_path / "prepared"
    prepare(open_text(Source(str(text))), BYTES, to=to)
    names = [to, to / "tokens", to / "tokens.bin", to / "tokens.idx"]
    prints = {
        open_rows(Source(str(name)), Packing(10), tokenizer=BYTES, cache=tmp_path).fingerprint
        for name in names
    }
    prints.add(
        open_rows(Source(str(to)), Packing(10), tokenizer=None, cache=tmp_path).fingerprint
    )
    prints.add(
        open_rows(
            Source(str(text)), Packing(10), tokenizer=BYTES, cache=tmp_path / "cache"
        ).fingerprint
    )
    assert len(prints) == 1


def test_store_made_elsewhere_needs_no_tokenizer(text: Path, tmp_path: Path) -> None:
    made = prepare(open_text(Source(str(text))), BYTES, to=tmp_path / "x")
    made.prefix.with_suffix(".json").unlink()
    store = open_store(Source(str(tmp_path / "x")), tokenizer=None, cache=tmp_path)
    assert (store.num_tokens, store.num_documents, store.end_id) == (63, 3, None)
    assert (
        open_store(Source(str(tmp_path / "x")), tokenizer=BYTES, cache=tmp_path).num_tokens
        == 63
    )


def test_what_is_a_store(text: Path, tmp_path: Path) -> None:
    prepare(open_text(Source(str(text))), BYTES, to=tmp_path / "x")
    assert store_prefix(str(tmp_path / "x" / "tokens")) == tmp_path / "x" / "tokens"
    for source in (
        "stdlib",
        "hf:owner/name",
        str(text),
        str(text / "a.txt"),
        str(text / "*.txt"),
        "nowhere",
    ):
        assert store_prefix(source) is None


def test_every_packing_by_name(text: Path, tmp_path: Path) -> None:
    for packing, kind in (
        ("concat", ConcatRows),
        ("best_fit", PaddedRows),
        ("none", PaddedRows),
    ):
        rows = open_rows(
            Source(str(text)), Packing(50, packing), tokenizer=BYTES, cache=tmp_path / "cache"
        )
        assert type(rows) is kind
        assert rows.report.num_tokens == 63
    best_fit = open_rows(
        Source(str(text)), Packing(50, "best_fit"), tokenizer=BYTES, cache=tmp_path / "cache"
    )
    none = open_rows(
        Source(str(text)), Packing(50, "none"), tokenizer=BYTES, cache=tmp_path / "cache"
    )
    assert (best_fit.num_rows, none.num_rows) == (2, 3)


def test_stdlib_rows_are_the_library(tmp_path: Path) -> None:
    rows = open_rows(Source("stdlib"), Packing(256), tokenizer=BYTES, cache=tmp_path)
    assert rows.store.num_tokens > 5_000_000
    assert rows.num_rows == (rows.store.num_tokens - 1) // 256
    document = rows.store.tokens[: rows.store.document_ends[0]]
    source = open_text(Source("stdlib"))
    first = (source.root / source.paths[0]).read_bytes()  # type: ignore[attr-defined]
    assert document.tolist() == [*first, 256]


def test_reading_loads_no_torch(text: Path, tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from pathlib import Path; from threefold.data.rows.packing import Packing, open_rows;"
        "from threefold.data.text.source import Source;"
        "from threefold.data.tokens import load_tokenizer;"
        "source, cache = Source(sys.argv[1]), Path(sys.argv[2]);"
        "rows = open_rows(source, Packing(10), tokenizer=load_tokenizer('bytes'), cache=cache);"
        "rows.rows(np.arange(2)); print('torch' in sys.modules, 'datasets' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(text), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout.split() == ["False", "False"]
