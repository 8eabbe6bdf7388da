"""Sources of text: which documents, in which order, under which fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.store.open_source import open_text
from threefold.data.text import hub, known_bytes
from threefold.data.text import rows as text_rows
from threefold.data.text.fields import TextField
from threefold.data.text.files import Files
from threefold.data.text.known_bytes import SourceFile
from threefold.data.text.source import Labels, Piece, ReadLog, Source, TextSource, log_error
from threefold.errors import DataError


@pytest.fixture(autouse=True)
def cache_of_datasets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets")
    )


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, texts: list[str | None], group: int = 2) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "n": range(len(texts))}), path, row_group_size=group
    )
    return path


def documents(source: TextSource, *, skip_bad: bool = False) -> list[str]:
    """All documents of a source, or the error that preparing it ends with."""
    log = ReadLog(skip_bad=skip_bad)
    texts = [text for piece in source.pieces for text in source.read(piece, log)]
    if log.num_bad:
        raise log_error(source, log)
    return texts


def read(source: str | Path, **options: object) -> list[str]:
    return documents(open_text(source_of(source, **options)))


def source_of(name: str | Path, *, text_field: str = "text", **options: Any) -> Source:
    return Source(str(name), labels=Labels(fields={"text": text_field}), **options)


def test_stdlib_is_the_library_without_packages_and_tests() -> None:
    source = open_text(Source("stdlib"))
    assert isinstance(source, Files)
    assert 400 < len(source.paths) < 1500
    assert "json/decoder.py" in source.paths and "unittest/case.py" in source.paths
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not any(excluded & set(path.split("/")[:-1]) for path in source.paths)
    assert list(source.paths) == sorted(source.paths)
    first = source.paths.index("json/decoder.py")
    text = next(iter(source.read(source.pieces[first], ReadLog())))
    assert (
        text.encode()
        == (Path(sysconfig.get_paths()["stdlib"]) / "json/decoder.py").read_bytes()
    )


def test_stdlib_leaves_undecodable_files_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {
        "b.py": b"b",
        "a.py": b"\xe9",
        "test/x.py": b"x",
        "p/tests/x.py": b"x",
        "a/z.py": b"z",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    source, log = open_text(Source("stdlib")), ReadLog()
    # "a.py" sorts before "a/z.py": "." before "/".
    assert [text for piece in source.pieces for text in source.read(piece, log)] == ["z", "b"]
    assert (log.num_skipped, log.num_bad) == (1, 0)


def test_folder_is_recursive_sorted_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/2.txt", "a.md", "c.py", "B.TXT", "skip.rst", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "b" / "1.jsonl", [{"text": "row 1"}, {"text": "row 2"}])
    assert read(tmp_path) == ["B.TXT", "a.md", "row 1", "row 2", "b/2.txt", "c.py"]


def test_glob(tmp_path: Path) -> None:
    for name in ("a/x/1.txt", "a/2.txt", "b/3.txt", "b/4.md", "b/5.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*" / "*.txt") == ["a/2.txt", "b/3.txt"]
    assert read(tmp_path / "**" / "*") == ["a/2.txt", "a/x/1.txt", "b/3.txt", "b/4.md"]
    assert read(tmp_path / "b" / "[34].*") == ["b/3.txt", "b/4.md"]


def test_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "a1.txt").write_text("other")
    assert read(tmp_path / "a[1].txt") == ["one"]


def test_text_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\rthree \ufeff é\n".encode())
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\rthree \ufeff é\n"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "b.txt").write_bytes(b"text")
    before = open_text(Source(str(tmp_path)))
    recipe = hashlib.blake2b(b"files 1 None False", digest_size=16)
    content = hashlib.blake2b(
        hashlib.blake2b(b"text", digest_size=16).digest(), digest_size=16
    ).hexdigest()
    recipe.update(f"\na.txt\0004\0{content}\nb.txt\0004\0{content}".encode())
    assert before.fingerprint == recipe.hexdigest()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbftext")
    marked = open_text(Source(str(tmp_path)))
    assert documents(marked) == ["text", "text"]


@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=30),
    piece_bytes=st.integers(1, 80),
    blank=st.sampled_from(["", "\n", " \r\n\n"]),
    last=st.booleans(),
)
def test_jsonl_gives_each_line_once_for_any_pieces(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    piece_bytes: int,
    blank: str,
    last: bool,
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    body = (blank + "\n").join(json.dumps({"text": line}, ensure_ascii=False) for line in lines)
    path.write_bytes((body + ("\n" if last else "")).encode())
    size, log = path.stat().st_size, ReadLog()
    stretches = [
        Piece(0, at, min(at + piece_bytes, size), piece_bytes)
        for at in range(0, size, piece_bytes)
    ]
    texts = [
        text
        for piece in stretches
        for text in text_rows.read_jsonl(
            SourceFile(path), piece, take=TextField("text"), log=log
        )
    ]
    assert texts == lines
    assert (log.num_rows, log.num_with_field, log.num_bad) == (len(lines), len(lines), 0)


def test_jsonl_with_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}')
    assert read(tmp_path / "x.jsonl") == ["a", "b"]


def test_bad_line_is_named_in_whichever_piece_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE_BYTES", 40)
    lines = ["" if i == 5 else json.dumps({"text": f"line {i}"}) for i in range(1, 31)]
    lines[22] = "{not json"
    lines[26] = "[1]"
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    source, log = open_text(Source(str(tmp_path / "x.jsonl"))), ReadLog()
    assert len(source.pieces) > 10
    texts = [text for piece in source.pieces for text in source.read(piece, log)]
    assert texts == [f"line {i}" for i in range(1, 31) if i not in (5, 23, 27)]
    assert [problem.what.split(": ")[0].split(", ")[1] for problem in log.problems] == [
        "line 23",
        "line 27",
    ]


def test_bad_lines_are_counted_when_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"text": "a"}\nnope\n{"text": 1}\n{"t": ""}\n{"text": "b"}\n'
    )
    (tmp_path / "y.txt").write_bytes(b"\xff")
    source, log = open_text(Source(str(tmp_path))), ReadLog(skip_bad=True)
    assert [text for piece in source.pieces for text in source.read(piece, log)] == ["a", "b"]
    assert (log.num_skipped, log.problems) == (4, [])
    assert documents(source, skip_bad=True) == ["a", "b"]


def test_reading_stops_soon_where_every_line_is_bad(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"body": "b"}] * 5000)
    source, log = open_text(Source(str(tmp_path / "x.jsonl"))), ReadLog()
    assert list(source.read(source.pieces[0], log)) == []
    assert (log.num_bad, len(log.problems)) == (1000, 3)


def test_parquet_rows_in_order_by_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [f"row {i}" for i in range(7)])
    source = open_text(Source(str(tmp_path / "x.parquet")))
    assert len(source.pieces) == 4
    assert documents(source) == [f"row {i}" for i in range(7)]


def test_parquet_null_is_named_by_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", ["a", "b", "c", None, "e"])
    source = open_text(Source(str(tmp_path / "x.parquet")))
    with pytest.raises(DataError, match="row 3: the text is null"):
        documents(source)
    assert documents(source, skip_bad=True) == ["a", "b", "c", "e"]


def test_parquet_text_in_a_dictionary(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == ["a", "b", "a"]


def test_text_field(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"text": "no", "body": "yes"}])
    assert read(tmp_path / "x.jsonl", text_field="body") == ["yes"]


def test_hub_source_through_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": f"train {i}", "id": i} for i in range(5)])
    write_jsonl(tmp_path / "test.jsonl", [{"text": "held out", "id": 0}])
    monkeypatch.setattr(hub, "_PIECE_BYTES", 30)
    source = open_text(Source(f"hf:{tmp_path}"))
    assert len(source.pieces) > 1
    assert documents(source) == [f"train {i}" for i in range(5)]
    held_out = open_text(Source(f"hf:{tmp_path}", split="test"))
    assert documents(held_out) == ["held out"]
    assert (
        open_text(Source(f"hf:{tmp_path}")).fingerprint
        == source.fingerprint
        != held_out.fingerprint
    )
    assert read(f"hf:{tmp_path}", split="train[:2]") == ["train 0", "train 1"]


def test_hub_null_is_named_by_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match="row 1: the text is null"):
        read(f"hf:{tmp_path}")


@pytest.mark.parametrize("kind", ["files", "hub"])
def test_sources_pickle(tmp_path: Path, kind: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a"}, {"text": "b"}])
    source = open_text(Source(f"hf:{tmp_path}" if kind == "hub" else str(tmp_path)))
    again = pickle.loads(pickle.dumps(source))
    assert documents(again) == ["a", "b"]
    assert again.fingerprint == source.fingerprint


def test_fingerprint_follows_content_names_and_field_but_not_the_place(tmp_path: Path) -> None:
    def fingerprint(folder: str, files: dict[str, str], text_field: str = "text") -> str:
        for name, content in files.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text(content)
        return open_text(source_of(tmp_path / folder, text_field=text_field)).fingerprint

    base = fingerprint("a", {"1.txt": "one", "2.txt": "two"})
    assert base == fingerprint("b", {"1.txt": "one", "2.txt": "two"})
    # The field plays no part where no file has rows.
    assert base == fingerprint("b", {}, text_field="body")
    assert base != fingerprint("c", {"1.txt": "one", "2.txt": "twO"})
    assert base != fingerprint("d", {"1.txt": "one", "3.txt": "two"})
    assert base != fingerprint("e", {"1.txt": "onet", "2.txt": "wo"})
    rows = fingerprint("f", {"x.jsonl": '{"text": "a", "body": "b"}'})
    assert rows != fingerprint("f", {}, text_field="body")


def test_digests_are_remembered_while_files_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, memory, read = tmp_path / "a", tmp_path / "cache", list[str]()
    whole = known_bytes._digest

    def counted(data: bytes) -> bytes:
        read.extend(
            name
            for name, text in (("1.txt", b"one"), ("2.txt", b"two"), ("2.txt", b"twO"))
            if text == data
        )
        return whole(data)

    def fingerprint(cache: Path | None = memory) -> str:
        read.clear()
        return open_text(Source(str(folder)), memory=cache).fingerprint

    def settle() -> None:
        """As if the files had been written long ago; a time of change cannot be set."""
        monkeypatch.setattr(known_bytes, "_SETTLED_NS", -(10**12))

    monkeypatch.setattr(known_bytes, "_digest", counted)
    folder.mkdir()
    for name, text in (("1.txt", "one"), ("2.txt", "two")):
        (folder / name).write_text(text)
    base = fingerprint(None)
    # Too new to be remembered.
    assert [fingerprint(), fingerprint()] == [base] * 2 and read == ["1.txt", "2.txt"]
    settle()
    assert [fingerprint(), read[:], fingerprint(), read[:]] == [
        base,
        ["1.txt", "2.txt"],
        base,
        [],
    ]
    stat = (folder / "2.txt").stat()
    (folder / "2.txt").write_text("twO")
    os.utime(folder / "2.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = fingerprint()
    assert changed != base and read == ["2.txt"]
    (kept,) = memory.iterdir()
    content = kept.read_bytes()
    for place in range(0, len(content), 7):
        kept.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert fingerprint() == changed and len(read) == 2, place
        kept.write_bytes(content)
    kept.write_bytes(content[:40])
    assert fingerprint() == changed and len(read) == 2
    assert fingerprint() == changed and not read


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.txt").write_text("home")
    assert read("~/x.txt") == ["home"]


def test_folder_of_the_hub_is_known_by_its_content(tmp_path: Path) -> None:
    """datasets tells files apart by path, size and time: a file that was rewritten with both gave the old rows."""
    folder = tmp_path / "one"
    folder.mkdir()
    file = folder / "train.jsonl"
    file.write_text('{"text": "aaaa"}\n')
    stat = file.stat()
    first = open_text(Source(f"hf:{folder}"), memory=tmp_path / "memory")
    file.write_text('{"text": "bbbb"}\n')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = open_text(Source(f"hf:{folder}"), memory=tmp_path / "memory")
    texts = [text for piece in second.pieces for text in second.read(piece, ReadLog())]
    assert texts == ["bbbb"] and first.fingerprint != second.fingerprint
    folder.rename(tmp_path / "two")
    assert open_text(Source(f"hf:{tmp_path}/two")).fingerprint == second.fingerprint


def test_rows_of_the_hub_are_of_the_bytes_of_a_folder_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Arrow files that datasets makes are of the folder as it was, or they are not used; nor if they change."""
    folder = tmp_path / "one"
    folder.mkdir()
    file = folder / "train.jsonl"
    file.write_text('{"text": "aaaa"}\n')
    loaded = hub._loaded

    def load(*args: Any, **settings: Any) -> Any:
        file.write_text('{"text": "bbbb"}\n')
        dataset = loaded(*args, **settings)
        file.write_text('{"text": "aaaa"}\n')
        return dataset

    monkeypatch.setattr(hub, "_loaded", load)
    with pytest.raises(DataError) as raised:
        open_text(Source(f"hf:{folder}"))
    assert (
        raised.value.problems[0].what
        == f"{file} has changed, or is gone, since its fingerprint was made"
    )
    monkeypatch.setattr(hub, "_loaded", loaded)
    source = open_text(Source(f"hf:{folder}"))
    assert documents(source) == ["aaaa"]
    source.refuse_changed(source.pieces)
    (arrow,) = source.files  # type: ignore[attr-defined]
    content = arrow.read_bytes()
    arrow.write_bytes(content.replace(b"aaaa", b"cccc"))
    for what in (
        lambda: source.refuse_changed(source.pieces),
        lambda: open_text(Source(f"hf:{folder}")),
    ):
        with pytest.raises(DataError) as raised:
            what()
        assert (
            raised.value.problems[0].what
            == f"{arrow} has changed, or is gone, since its fingerprint was made"
        )
    arrow.write_bytes(content)
    assert open_text(Source(f"hf:{folder}")).fingerprint == source.fingerprint
    # A process that was killed, or a full disk, leaves the record of those files cut: they are made again.
    checked = next(
        arrow.parents[up] / "checked.json"
        for up in range(9)
        if (arrow.parents[up] / "checked.json").exists()
    )
    kept = checked.read_bytes()
    for cut in (b"", kept[: len(kept) // 2], b"[]"):
        checked.write_bytes(cut)
        assert open_text(Source(f"hf:{folder}")).fingerprint == source.fingerprint
        assert checked.read_bytes() == kept


def test_a_folder_of_save_to_disk_is_known_by_its_bytes(tmp_path: Path) -> None:
    """state.json has a name for the content, which stays when the bytes change."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["aaaa", "other"]}).save_to_disk(str(folder))
    (arrow,) = folder.glob("*.arrow")
    stat = arrow.stat()
    first = open_text(Source(str(folder)), memory=tmp_path / "memory")
    arrow.write_bytes(arrow.read_bytes().replace(b"aaaa", b"bbbb"))
    os.utime(arrow, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match="has changed, or is gone"):
        first.refuse_changed(first.pieces)
    second = open_text(Source(str(folder)), memory=tmp_path / "memory")
    assert documents(second) == ["bbbb", "other"] and first.fingerprint != second.fingerprint
    folder.rename(tmp_path / "moved")
    assert open_text(Source(str(tmp_path / "moved"))).fingerprint == second.fingerprint


def test_three_problems_of_a_kind_are_named() -> None:
    log = ReadLog()
    for number in range(5):
        log.bad(f"a {number}", expected="one", fix="f")
    other = ReadLog()
    other.bad("a 5", expected="one", fix="f")
    other.bad("b 6", expected="other", fix="f")
    log.merge(other)
    assert [each.what for each in log.problems] == [
        "a 0",
        "a 1",
        "a 2",
        "b 6",
    ] and log.num_bad == 7
