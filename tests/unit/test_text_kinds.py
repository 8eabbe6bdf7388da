"""Compressed files, .json, .csv, fields inside fields, lists and saved datasets: each text once, in order."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.store.open_source import open_text
from threefold.data.text import known_bytes
from threefold.data.text import rows as text_rows
from threefold.data.text.fields import TextField
from threefold.data.text.known_bytes import SourceFile
from threefold.data.text.source import Labels, Piece, ReadLog, Source, TextSource, log_error
from threefold.errors import DataError

TEXTS = ["one", "", 'two, "quoted"\nand a line', "drei é\u2028", "four\r\nlines"]


def zstd(content: bytes) -> bytes:
    made = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(made, "zstd") as stream:
        stream.write(content)
    return bytes(made.getvalue().to_pybytes())


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def as_csv(texts: list[str], *header: str) -> bytes:
    made = io.StringIO(newline="")
    writer = csv.writer(made)
    writer.writerow(header or ("id", "text"))
    writer.writerows([number, text] for number, text in enumerate(texts))
    return made.getvalue().encode()


def as_lines(texts: list[str]) -> bytes:
    return "".join(
        json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts
    ).encode()


def as_list(texts: list[str]) -> bytes:
    return json.dumps([{"text": text} for text in texts], indent=1).encode()


def documents(source: TextSource, *, skip_bad: bool = False) -> list[str]:
    log = ReadLog(skip_bad=skip_bad)
    texts = [text for piece in source.pieces for text in source.read(piece, log)]
    if log.num_bad:
        raise log_error(source, log)
    return texts


def read(
    source: str | Path | tuple[str, ...], *, skip_bad: bool = False, **options: Any
) -> list[str]:
    labels = Labels(fields={"text": options.pop("text_field", "text")})
    opened = open_text(
        Source(source if isinstance(source, tuple) else str(source), labels=labels, **options)
    )
    return documents(pickle.loads(pickle.dumps(opened)), skip_bad=skip_bad)


@pytest.mark.parametrize("packed", list(PACK))
@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".jsonl", as_lines),
        (".json", as_lines),
        (".json", as_list),
        (".json", lambda texts: b"\xef\xbb\xbf\n  " + as_list(texts)),
        (".csv", as_csv),
        (".csv", lambda texts: b"\xef\xbb\xbf" + as_csv(texts, "text\n1", "text")),
    ],
)
def test_rows_of_every_kind(
    tmp_path: Path, suffix: str, content: Callable[[list[str]], bytes], packed: str
) -> None:
    (tmp_path / f"a{suffix}{packed}").write_bytes(PACK[packed](content(TEXTS)))
    assert read(tmp_path / f"a{suffix}{packed}") == TEXTS
    assert read(tmp_path) == TEXTS


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_compressed_text_is_a_document(tmp_path: Path, packed: str) -> None:
    (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed]("\ufeffone\r\ntwo é".encode()))
    # As `cat a.gz b.gz` and parallel compressors write them.
    (tmp_path / f"b.md{packed}").write_bytes(PACK[packed](b"three ") + PACK[packed](b"four"))
    assert read(tmp_path) == ["one\r\ntwo é", "three four"]


def test_json_of_one_object_and_of_none(tmp_path: Path) -> None:
    for name, content in {
        "a": '{"text": "one"}',
        "b": '{\n "text": "two",\n "id": 1\n}\n',
        "c": "[]",
    }.items():
        (tmp_path / f"{name}.json").write_text(content)
    assert read(tmp_path) == ["one", "two"]


def test_bad_rows_are_named_by_line_or_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one"}, 5, {"body": ""}, {"text": null}]')
    (tmp_path / "b.csv").write_bytes(b'id,text\n1,"two\nlines"\n2\n\n3,caf\xe9\n4,four\n')
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "five"}\n\nnope\n{"text": "six"}\n')
    )
    (tmp_path / "d.json").write_text("[{}")
    source = open_text(Source(str(tmp_path)))
    with pytest.raises(DataError) as caught:
        documents(source)
    assert [problem.what.replace(f"{tmp_path}/", "") for problem in caught.value.problems] == [
        "a.json, row 1: a number, not an object",
        "a.json, row 2: no field 'text'; it has body",
        "a.json, row 3: field 'text' is null, not text",
        "b.csv, line 4: 1 fields, not 2",
        "b.csv, line 6: the text is not UTF-8",
        "c.jsonl.gz, line 3: not JSON: Expecting value at character 0",
        "d.json is not JSON: Expecting ',' delimiter: line 1 column 4 (char 3)",
    ]
    log = ReadLog(skip_bad=True)
    texts = [text for piece in source.pieces for text in source.read(piece, log)]
    assert (texts, log.num_skipped) == (["one", "two\nlines", "four", "five", "six"], 7)


def test_damaged_line_first_in_a_json_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": \n{"text": "two"}\n')
    assert read(tmp_path, skip_bad=True) == ["two"]


def test_zeros_behind_a_gzip_are_no_damage(tmp_path: Path) -> None:
    """As tapes and copies of block devices have them."""
    packed = gzip.compress(as_lines(["one"])) + gzip.compress(as_lines(["two"]))
    (tmp_path / "a.jsonl.gz").write_bytes(packed + bytes(700))
    assert read(tmp_path) == ["one", "two"]
    (tmp_path / "a.jsonl.gz").write_bytes(packed + b"x")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be decompressed"):
        read(tmp_path)


def parquet_of(texts: list[str]) -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table, file, compression="none", row_group_size=2, use_dictionary=False
    )
    return file.getvalue()


KINDS_OF_FILES: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": lambda texts: " ".join(texts).encode(),
    ".jsonl": as_lines,
    ".json": as_list,
    ".csv": as_csv,
    ".jsonl.zst": lambda texts: PACK[".zst"](as_lines(texts)),
    ".jsonl.gz": lambda texts: gzip.compress(as_lines(texts), 0),
    ".parquet": parquet_of,
}


@pytest.mark.parametrize("skip_bad", [False, True], ids=["refuse", "skip"])
@pytest.mark.parametrize("suffix", KINDS_OF_FILES)
def test_no_byte_is_read_that_the_fingerprint_is_not_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, skip_bad: bool
) -> None:
    """Whatever a file's size, times and number say, and whether its parts are read here or elsewhere."""
    monkeypatch.setattr(known_bytes, "BLOCK_BYTES", 50)
    file = tmp_path / f"a{suffix}"
    texts = [f"text {number:03}" for number in range(20)]
    file.write_bytes(KINDS_OF_FILES[suffix](texts))
    source = open_text(Source(str(tmp_path), skip_bad_lines=skip_bad))
    assert source.fingerprint
    source = pickle.loads(pickle.dumps(source))
    log = ReadLog(skip_bad=skip_bad)
    found = [text for piece in source.pieces for text in source.read(piece, log)]
    assert found == ([" ".join(texts)] if suffix == ".txt" else texts)
    file.write_bytes(KINDS_OF_FILES[suffix]([*texts[:-1], "text XXX"]))
    with pytest.raises(DataError) as raised:
        _ = [text for piece in source.pieces for text in source.read(piece, log)]
    assert (
        raised.value.problems[0].what
        == f"{file} has changed, or is gone, since its fingerprint was made"
    )


def test_quotes_of_a_csv_that_never_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"two\n3,three\n')
    with pytest.raises(
        DataError, match=r"a\.csv, line 3: unexpected end of data; nothing after it can be read"
    ):
        read(tmp_path)
    assert read(tmp_path, skip_bad=True) == ["one"]


def test_csv_without_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv(TEXTS, "id", "body"))
    with pytest.raises(DataError, match="none of the first 5 rows has this field") as caught:
        read(tmp_path)
    assert caught.value.problems[0].expected == "one of the existing fields: id, body"
    assert read(tmp_path, text_field="body") == TEXTS


def test_documents_above_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv(["x" * 300_000]))
    assert [len(text) for text in read(tmp_path)] == [300_000]


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv"])
def test_damaged_compressed_file_is_named_and_gives_no_row(
    tmp_path: Path, suffix: str, packed: str
) -> None:
    content = {
        ".txt": b"text",
        ".jsonl": as_lines(TEXTS),
        ".json": as_list(TEXTS),
        ".csv": as_csv(TEXTS),
    }[suffix]
    (tmp_path / f"a{suffix}{packed}").write_bytes(PACK[packed](content * 2000)[:-5])
    (tmp_path / "b.jsonl").write_bytes(as_lines(["good"]))
    with pytest.raises(
        DataError,
        match=rf"a{suffix}{packed} cannot be decompressed: (Truncated|Compressed file ended)",
    ):
        read(tmp_path)
    source, log = open_text(Source(str(tmp_path))), ReadLog(skip_bad=True)
    assert [text for piece in source.pieces for text in source.read(piece, log)] == ["good"]
    assert log.num_skipped == 1


# --- fields inside fields ------------------------------------------------------------------------------------------

NESTED = [{"meta": {"text": text, "n": 1}, "id": number} for number, text in enumerate(TEXTS)]


def write_nested(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
        return str(folder / "a.parquet")
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
        return str(folder / "saved")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hf:{folder}" if kind == "hub" else str(folder / "train.jsonl")


@pytest.fixture(autouse=True)
def cache_of_datasets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets")
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub", "saved"])
def test_field_inside_a_field(tmp_path: Path, kind: str) -> None:
    source = write_nested(tmp_path, kind, NESTED)
    assert read(source, text_field="meta.text") == TEXTS
    with pytest.raises(DataError) as caught:
        read(source)
    assert (
        caught.value.problems[0].expected == "one of the existing fields: meta.text, meta.n, id"
    )
    assert caught.value.problems[0].fix == "--data.fields '{text: meta.text}'"
    with pytest.raises(DataError, match=r"data\.fields\.text = 'meta\.body'"):
        read(source, text_field="meta.body")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub", "saved"])
def test_field_whose_name_has_a_dot_comes_first(tmp_path: Path, kind: str) -> None:
    source = write_nested(
        tmp_path, kind, [{"meta.text": "literal", "meta": {"text": "inside"}}]
    )
    assert read(source, text_field="meta.text") == ["literal"]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_null_inside_a_field_is_named_by_row(tmp_path: Path, kind: str) -> None:
    source = write_nested(
        tmp_path,
        kind,
        [NESTED[0], {"meta": None, "id": 1}, {"meta": {"text": None, "n": 2}, "id": 2}],
    )
    with pytest.raises(DataError) as caught:
        read(source, text_field="meta.text")
    assert [each.what.rpartition(", ")[2] for each in caught.value.problems] == [
        "row 1: the text is null",
        "row 2: the text is null",
    ]


# --- lists and saved datasets --------------------------------------------------------------------------------------


def test_list_is_read_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["a1", "a2"]))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(as_csv(["b1"])))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.jsonl").write_bytes(as_lines(["c1"]))
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.csv.gz", "c"))
    assert read((b, a, f"hf:{c}")) == ["b1", "a1", "a2", "c1"]
    assert read((a, str(tmp_path))) == ["a1", "a2", "b1", "c1"]  # each file once
    one, other = open_text(Source((a, b))), open_text(Source((b, a)))
    assert one.fingerprint != other.fingerprint and one.name == f"[{a}, {b}]"
    assert open_text(Source((a,))).fingerprint == open_text(Source(a)).fingerprint
    (tmp_path / "a.jsonl").write_bytes(b"nope\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: not JSON"):
        read((b, a))


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_saved_dataset(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threefold.data.text.hub._PIECE_BYTES", 30)
    rows = datasets.Dataset.from_dict(
        {"id": list(range(50)), "text": [f"row {i}" for i in range(50)]}
    )
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": rows, "test": rows.select([3, 1])}).save_to_disk(
        tmp_path / "splits"
    )
    assert read(f"{prefix}{tmp_path}/one") == [f"row {i}" for i in range(50)]
    assert read(f"{prefix}{tmp_path}/splits") == [f"row {i}" for i in range(50)]
    assert read(f"{prefix}{tmp_path}/splits", split="test") == ["row 3", "row 1"]
    again = open_text(Source(f"{tmp_path}/one"))
    assert again.fingerprint == open_text(Source(f"hf:{tmp_path}/one")).fingerprint
    assert (
        again.fingerprint != open_text(Source(f"{tmp_path}/splits", split="test")).fingerprint
    )


# --- damaged .parquet, and lines longer than a piece ---------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_damaged_page_is_named_by_row_group(tmp_path: Path, compression: str) -> None:
    path, texts = tmp_path / "a.parquet", [f"row {i} " + "x" * (i % 7) for i in range(30)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table,
        path,
        row_group_size=10,
        compression=compression,
        use_dictionary=False,
        write_page_checksum=True,
    )
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, row group 1, rows 10 to 19: .*CRC"):
        read(path)
    log, source = ReadLog(skip_bad=True), open_text(Source(str(path)))
    assert [text for piece in source.pieces for text in source.read(piece, log)] == texts[
        :10
    ] + texts[20:]
    assert log.num_skipped == 10


def test_cut_parquet_is_one_file_that_is_skipped(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet is not readable as \.parquet: "):
        read(tmp_path)
    source, log = open_text(Source(str(tmp_path), skip_bad_lines=True)), ReadLog(skip_bad=True)
    assert [text for piece in source.pieces for text in source.read(piece, log)] == TEXTS
    assert log.num_skipped == 1


@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_text_that_is_not_utf8_is_named_by_row(
    tmp_path: Path, dictionary: bool
) -> None:
    raw = pyarrow.array([b"good", b"caf\xe9", None, b"fine"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 4, raw.buffers())
    pyarrow.parquet.write_table(
        pyarrow.table({"text": text}), tmp_path / "a.parquet", use_dictionary=dictionary
    )
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert [each.what.rpartition(", ")[2] for each in caught.value.problems] == [
        "row 1: the text is not UTF-8",
        "row 2: the text is null",
    ]
    assert read(tmp_path, skip_bad=True) == ["good", "fine"]


def test_a_line_over_many_pieces_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece in it used to read on to its end."""
    monkeypatch.setattr(text_rows, "_PIECE_BYTES", 1 << 12)
    path, long = tmp_path / "a.jsonl", "x" * (1 << 20)
    path.write_bytes(as_lines(["first", long, "last"]))
    num_bytes = 0

    class Counting(io.BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            nonlocal num_bytes
            line = super().readline(-1 if size is None else size)
            num_bytes += len(line)
            return line

    opened = text_rows.opened

    def counting(path: Path, compression: str | None) -> Any:
        with opened(path, compression) as file:
            return Counting(io.BytesIO(file.read()))  # type: ignore[arg-type]

    monkeypatch.setattr(text_rows, "opened", counting)
    assert read(path) == ["first", long, "last"]
    assert num_bytes < 2.1 * path.stat().st_size


@given(size=st.integers(1, 40), texts=st.lists(st.text(max_size=60), max_size=6))
def test_lines_longer_than_pieces(
    tmp_path_factory: pytest.TempPathFactory, size: int, texts: list[str]
) -> None:
    path, log = tmp_path_factory.mktemp("lines") / "a.jsonl", ReadLog()
    path.write_bytes("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    total = path.stat().st_size
    pieces = [Piece(0, at, min(at + size, total), size) for at in range(0, total, size)]
    valid = [
        text
        for text in texts
        if not any("\ud800" <= character <= "\udfff" for character in text)
    ]
    found = [
        text
        for piece in pieces
        for text in text_rows.read_jsonl(
            SourceFile(path), piece, take=TextField("text"), log=log
        )
    ]
    assert (found, log.num_bad) == (valid, len(texts) - len(valid))
