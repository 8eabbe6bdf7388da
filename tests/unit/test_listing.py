"""Which files a source means: each real file once, in the order of earlier releases, and the reason for the others."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest

from threefold.data.store.open_source import files_of, open_text
from threefold.data.text.files import Files
from threefold.data.text.listing import (
    FileList,
    Known,
    counted,
    kind_of,
    list_folder,
    list_glob,
    summary,
    write_list,
)
from threefold.data.text.source import Source
from threefold.errors import DataError


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of {name}")


def read(source: str | Path | tuple[str, ...]) -> tuple[str, ...]:
    (files,) = files_of(Source(source if isinstance(source, tuple) else str(source)))
    return files.read


def reasons(files: FileList) -> dict[str, str]:
    return {each.path: each.why for each in files.left_out}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", (".txt", None)),
        ("A.JSONL.GZ", (".jsonl", "gzip")),
        ("a.csv.zst", (".csv", "zstd")),
        ("a.b.json", (".json", None)),
        ("a.parquet", (".parquet", None)),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a.bin", None),
        ("gz", None),
    ],
)
def test_kind_is_told_by_the_name(name: str, kind: tuple[str, str | None] | None) -> None:
    assert kind_of(name) == kind


def test_folder_says_what_it_leaves_out(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a.txt",
        "b.jsonl",
        "c.jsonl.gz",
        "d.bin",
        "e.bin",
        "f",
        ".g.txt",
        ".git/h.txt",
        "i/j.md",
        "k.json",
    )
    (tmp_path / "l.txt.gz").touch()
    (tmp_path / "m.txt").touch()
    os.mkfifo(tmp_path / "n.txt")
    files = list_folder(tmp_path, {})
    assert files.read == ("a.txt", "b.jsonl", "c.jsonl.gz", "i/j.md", "m.txt")
    assert {path: why.partition(":")[0][:20] for path, why in reasons(files).items()} == {
        "d.bin": "not one of .txt, .md",
        "e.bin": "not one of .txt, .md",
        "f": "not one of .txt, .md",
        ".g.txt": "its name begins with",
        ".git": "its name begins with",
        "k.json": "rows beside document",
        "l.txt.gz": "empty",
        "n.txt": "not an ordinary file",
    }
    assert (
        counted(files.left_out)
        == "2 hidden, 2 .bin, 1 without a suffix, 1 .json, 1 empty, 1 special"
    )
    num_bytes = len("of a.txtof b.jsonlof c.jsonl.gzof i/j.md")
    assert (
        summary([files])
        == f"5 files read ({num_bytes} bytes), 8 left out ({counted(files.left_out)})"
    )


def test_folder_of_rows_leaves_its_readme_out(tmp_path: Path) -> None:
    make(tmp_path, "README.md", "data/a.parquet", "data/b.jsonl", "dataset_infos.json", "c.csv")
    files = list_folder(tmp_path, {})
    assert files.read == ("c.csv", "data/a.parquet", "data/b.jsonl")
    assert reasons(files) == {
        "README.md": "a README beside files of rows",
        "dataset_infos.json": "it describes data",
    }
    # Beside other documents it is one itself, and a glob means what it says.
    make(tmp_path, "alone/README.md", "alone/dataset_infos.json")
    assert list_folder(tmp_path / "alone", {}).read == ("README.md",)
    (tmp_path / "alone" / "README.md").unlink()
    make(tmp_path, "data/other.md")
    assert list_folder(tmp_path, {}).read == (
        "README.md",
        "data/a.parquet",
        "data/b.jsonl",
        "data/other.md",
    )
    assert list_glob(f"{tmp_path}/*.md", {}).read == ("README.md",)


def test_compressed_copy_beside_its_file_is_left_out(tmp_path: Path) -> None:
    """As `gzip --keep` leaves it: both would be every document twice."""
    make(tmp_path, "a.jsonl", "a.jsonl.gz", "b.jsonl.gz", "c/a.jsonl.zst")
    files = list_folder(tmp_path, {})
    assert files.read == ("a.jsonl", "b.jsonl.gz", "c/a.jsonl.zst")
    assert reasons(files) == {
        "a.jsonl.gz": "its name says that it is a copy of a file beside it"
    }


def test_later_kinds_do_not_change_a_folder_of_documents(tmp_path: Path) -> None:
    """A folder of code has .json and .csv files that are no rows; they were left out before, and are now."""
    make(tmp_path, "a.py", "package.json", "table.csv", "b.md")
    assert list_folder(tmp_path, {}).read == ("a.py", "b.md")


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    make(tmp_path, "corpus/b/1.txt", "other/2.txt", "other/deep/3.txt")
    # Sorts first, but b is the folder itself.
    (tmp_path / "corpus" / "a").symlink_to(tmp_path / "corpus" / "b")
    (tmp_path / "corpus" / "c").symlink_to(tmp_path / "other")
    (tmp_path / "corpus" / "d").symlink_to(tmp_path / "other" / "deep")
    (tmp_path / "other" / "loop").symlink_to(tmp_path)
    files = list_folder(tmp_path / "corpus", {})
    # The loop leads to the folder above, whose other folders it enters.
    assert files.read == ("b/1.txt", "c/2.txt", "c/deep/3.txt")
    assert {path: why.split(" as ")[0] for path, why in reasons(files).items()} == {
        "a": "the same folder",
        "c/loop/corpus": "the same folder",
        "c/loop/other": "the same folder",
        "d": "the same folder",
    }


def test_a_file_is_read_once_under_its_own_path(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "real/c.txt", "d.txt")
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "e.txt").symlink_to("real/c.txt")
    os.link(tmp_path / "d.txt", tmp_path / "f.txt")
    files = list_folder(tmp_path, {})
    assert files.read == ("b.txt", "d.txt", "real/c.txt")
    assert reasons(files) == {
        "a.txt": f"the same file as {tmp_path}/b.txt",
        "e.txt": f"the same file as {tmp_path}/real/c.txt",
        "f.txt": f"the same file as {tmp_path}/d.txt",
    }


def test_a_linked_file_from_elsewhere_keeps_its_name(tmp_path: Path) -> None:
    make(tmp_path, "blobs/1", "snapshot/x.txt")
    (tmp_path / "snapshot" / "a.jsonl").symlink_to(tmp_path / "blobs" / "1")
    assert list_folder(tmp_path / "snapshot", {}).read == ("a.jsonl", "x.txt")


def test_files_with_one_inode_number_that_are_no_links_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems number their files."""
    make(tmp_path, "a.txt", "b.txt")
    real = os.stat(tmp_path / "a.txt")
    monkeypatch.setattr("threefold.data.text.listing.os.stat", lambda *_, **__: real)
    assert list_folder(tmp_path, {}).read == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    "pattern", ["**/**/*.txt", "**/en/**/*.txt", "**/*.txt", "{en,en/en}/**/*.txt"]
)
def test_glob_gives_a_file_once(tmp_path: Path, pattern: str) -> None:
    make(tmp_path, "en/en/a.txt", "en/b.txt")
    assert sorted(Path(path).name for path in list_glob(f"{tmp_path}/{pattern}", {}).read) == [
        "a.txt",
        "b.txt",
    ]
    source = open_text(Source(f"{tmp_path}/{pattern}"))
    assert len(source.pieces) == 2


def test_braces_in_a_glob_stand_for_either(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.md", "c.py", "d/e.md", "d/f.bin")
    assert list_glob(f"{tmp_path}/**/*.{{txt,md}}", {}).read == ("a.txt", "b.md", "d/e.md")
    files = list_glob(f"{tmp_path}/{{a,d/*}}.{{txt,md,bin}}", {})
    assert (files.root, files.read, counted(files.left_out)) == (
        tmp_path,
        ("a.txt", "d/e.md"),
        "1 .bin",
    )


def test_a_folder_as_before_by_a_glob(tmp_path: Path) -> None:
    """The glob that a refused resume names: the same files in the same order, and so the same fingerprint."""
    make(
        tmp_path,
        "a.txt",
        "b.jsonl",
        "README.md",
        ".hidden.txt",
        "x/.git/c.txt",
        "x/y/d.py",
        "e.json",
        "f.bin",
    )
    before = open_text(Source(str(tmp_path)))
    make(tmp_path, "x/g.txt.gz")
    assert open_text(Source(str(tmp_path))).fingerprint != before.fingerprint
    again = open_text(Source(f"{tmp_path}/**/*.{{txt,md,py,jsonl,parquet}}"))
    assert again.fingerprint == before.fingerprint


def test_a_run_inside_a_source_is_left_out_by_name(tmp_path: Path) -> None:
    """Its journal and audit are rows to any reader; a run that lies at the root of a source is no source at all."""
    make(
        tmp_path,
        "a.jsonl",
        "runs/a/run.json",
        "runs/a/audit.jsonl",
        "runs/a/rows/x.jsonl",
        "runs/b.jsonl",
    )
    for files in (list_folder(tmp_path, {}), list_glob(f"{tmp_path}/**/*.jsonl", {})):
        assert files.read == ("a.jsonl", "runs/b.jsonl")
        assert reasons(files) == {"runs/a": "the folder of a run: its records are not data"}
        assert counted(files.left_out) == "1 run (runs/a)"
    with pytest.raises(DataError, match=r"1 run \(\.\)"):
        read(tmp_path / "runs/a")
    assert read(tmp_path / "runs/a/rows") == ("x.jsonl",)


def test_list_reads_each_file_once_in_the_order_of_its_entries(tmp_path: Path) -> None:
    make(tmp_path, "b/2.txt", "b/1.txt", "a/3.txt", "a/4.txt")
    lists = files_of(
        Source(
            (
                f"{tmp_path}/b/2.txt",
                f"{tmp_path}/a",
                f"{tmp_path}/**/*.txt",
                f"{tmp_path}/a/3.txt",
            )
        )
    )
    assert [files.read for files in lists] == [("2.txt",), ("3.txt", "4.txt"), ("b/1.txt",), ()]
    assert [counted(files.left_out) for files in lists] == [
        "",
        "",
        "3 read already",
        "1 read already",
    ]


def test_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.txt", "closed/b.txt")
    scan = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    # The superuser of a test machine may read everything.
    monkeypatch.setattr("os.scandir", closed)
    files = list_folder(tmp_path, {})
    assert (files.read, reasons(files)) == (
        ("a.txt",),
        {"closed": "the folder: Permission denied"},
    )


def test_link_to_nothing_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: No such file or directory"):
        _ = open_text(Source(str(tmp_path))).fingerprint


def test_list_in_a_file(tmp_path: Path) -> None:
    make(tmp_path, "corpus/a.txt", "corpus/b.bin")
    lists = files_of(Source(str(tmp_path / "corpus")))
    lists = [dataclasses.replace(files, key="data.source") for files in lists]
    assert write_list(lists, tmp_path) == f"listed in {tmp_path}/data.files.jsonl"
    read, left = (
        json.loads(line) for line in (tmp_path / "data.files.jsonl").read_text().splitlines()
    )
    assert read == {"path": f"{tmp_path}/corpus/a.txt", "bytes": 15, "key": "data.source"}
    assert left["path"] == f"{tmp_path}/corpus/b.bin" and left["left_out"].startswith(
        "not one of .txt"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "data.files.jsonl"]


def test_list_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make(tmp_path, "corpus/a.txt")
    monkeypatch.setattr("os.replace", full)
    said = write_list(files_of(Source(str(tmp_path / "corpus"))), tmp_path)
    assert said == f"not listed in {tmp_path}/data.files.jsonl: No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_sources_without_files_have_no_list(tmp_path: Path) -> None:
    make(tmp_path, "tokens.idx")
    assert files_of(Source("hf:owner/name")) == files_of(Source(str(tmp_path))) == []
    known: Known = {}
    assert list_folder(tmp_path, known).read == () and known == {}


def test_files_carry_their_list(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.bin")
    source = open_text(Source(str(tmp_path)))
    assert (
        isinstance(source, Files)
        and source.paths == ("a.txt",)
        and len(source.files.left_out) == 1
    )
