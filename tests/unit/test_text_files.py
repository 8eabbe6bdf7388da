"""Text at an address, on this machine: one listing is one folder, and nothing is taken for whole that is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from threefold.errors import DataError, RunError, ThreefoldError
from threefold.places import text_files as module
from threefold.places.faults import MissingObject, PlaceError
from threefold.places.place import StoredObject
from threefold.places.text_files import parted, text_files


def is_text(key: str) -> bool:
    return key.endswith((".txt", ".jsonl"))


class Objects:
    """Objects by their keys; `before_stat` is called before one is looked up, `fails` names one that cannot be read."""

    url = "s3://bkt/p"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects, self.read_keys = objects, list[str]()
        self.before_stat: Callable[[], object] = lambda: None
        self.fails = ""

    def _described(self, key: str) -> StoredObject:
        return StoredObject(key, len(self.objects[key]), str(hash(self.objects[key])), 0.0)

    def list(self) -> Iterator[StoredObject]:
        yield from map(self._described, self.objects)

    def read(self, key: str, *, start: int, length: int) -> bytes:
        if key == self.fails:
            raise PlaceError("it did not answer", expected="an answer", fix="later")
        self.read_keys.append(key)
        return self.objects[key][start : start + length]

    def stat(self, key: str) -> StoredObject | None:
        self.before_stat()
        return self._described(key) if key in self.objects else None


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    there = Objects(
        {"a.txt": b"a" * 100, "sub/b.jsonl": b"{}\n" * 50, "c.bin": b"?", "empty.txt": b""}
    )
    monkeypatch.setattr(module, "open_store", lambda address, environ: there)
    monkeypatch.setattr(module, "_RANGE_BYTES", 64)
    return there


def fetch(cache: Path, address: str = "s3://bkt/p") -> Path:
    return text_files(address, {}, cache, is_text, kinds=".txt or .jsonl")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("address", "folder", "pattern"),
    [
        ("s3://bkt/p", "s3://bkt/p", ""),
        ("s3://bkt/v1.0/", "s3://bkt/v1.0", ""),
        ("s3://bkt/p/a.txt", "s3://bkt/p", "a.txt"),
        ("s3://bkt/p/*/x-?.txt", "s3://bkt/p", "*/x-?.txt"),
        ("s3://bkt", "s3://bkt", ""),
        ("s3://bkt.txt", "s3://bkt.txt", ""),
        ("s3:/x", "s3:/x", ""),
    ],
)
def test_addresses_are_taken_apart(address: str, folder: str, pattern: str) -> None:
    assert parted(address, is_text) == (folder, pattern)


def test_one_listing_is_one_folder(objects: Objects, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    assert contents(first) == {
        key: objects.objects[key] for key in ("a.txt", "sub/b.jsonl", "empty.txt")
    }
    objects.read_keys.clear()
    assert fetch(tmp_path) == first and objects.read_keys == []
    objects.objects["a.txt"] = b"b" * 100  # of the same size
    second = fetch(tmp_path)
    assert second != first and contents(second)["a.txt"] == b"b" * 100
    objects.objects["c.bin"] = b"??"  # is not read
    assert fetch(tmp_path) == second
    (second / "a.txt").write_bytes(b"b" * 99)  # as a machine that lost its power left it
    assert fetch(tmp_path) == second and contents(second)["a.txt"] == b"b" * 100
    assert fetch(tmp_path, "s3://bkt/p/*.txt").parent not in (first, second)


def test_what_a_killed_fetch_left_is_kept_or_fetched_again(
    objects: Objects, tmp_path: Path
) -> None:
    objects.fails = "sub/b.jsonl"
    with pytest.raises(PlaceError):
        fetch(tmp_path)
    (partial,) = tmp_path.glob(".*.partial")
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path != partial]
    (partial / "a.txt").write_bytes(objects.objects["a.txt"])
    (partial / "empty.txt").unlink(missing_ok=True)
    objects.fails = ""
    objects.read_keys.clear()
    assert contents(fetch(tmp_path))["sub/b.jsonl"] == objects.objects["sub/b.jsonl"]
    assert set(objects.read_keys) == {"sub/b.jsonl"}


def test_listing_that_names_an_object_twice_is_that_of_its_objects(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, listed = fetch(tmp_path), objects.list
    monkeypatch.setattr(objects, "list", lambda: [*listed(), *listed()])
    assert fetch(tmp_path) == first
    assert contents(fetch(tmp_path / "new")) == contents(first)


def test_text_of_another_server_is_another_one(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where etags count versions, equal ones are no equal bytes."""
    monkeypatch.setattr(
        objects,
        "_described",
        lambda key: StoredObject(key, len(objects.objects[key]), "1", 0.0),
    )
    fetch(tmp_path)
    objects.objects["a.txt"] = b"b" * 100
    environ = {"AWS_ENDPOINT_URL": "https://another"}
    there = text_files("s3://bkt/p", environ, tmp_path, is_text, kinds=".txt")
    assert contents(there)["a.txt"] == b"b" * 100


def test_object_that_changes_while_it_is_fetched_is_named(
    objects: Objects, tmp_path: Path
) -> None:
    objects.before_stat = lambda: objects.objects.update({"a.txt": b"c" * 100})
    with pytest.raises(MissingObject, match=r"a\.txt has changed while it was fetched"):
        fetch(tmp_path)
    objects.before_stat = lambda: None
    assert contents(fetch(tmp_path))["a.txt"] == b"c" * 100


@pytest.mark.parametrize("key", ["../out.txt", "/etc/x.txt", "a//b.txt", "./a.txt", "a\0.txt"])
def test_key_that_leads_elsewhere_is_refused(
    objects: Objects, tmp_path: Path, key: str
) -> None:
    objects.objects[key] = b"text"
    with pytest.raises(DataError, match="is not a file path"):
        fetch(tmp_path / "cache")
    assert not list(tmp_path.rglob("*.txt"))


class Usage(NamedTuple):
    free: int


def test_bad_input(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(error: type[ThreefoldError], address: str = "s3://bkt/p") -> Any:
        with pytest.raises(error) as caught:
            fetch(tmp_path, address)
        (problem,) = caught.value.problems
        return problem

    assert said(DataError, "s3://bkt/p/none.txt").what == (
        "s3://bkt/p/none.txt is neither a token store nor text: it holds 4 objects of other kinds"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100))
    assert said(RunError).what == f"the disk of {tmp_path} has 100 bytes left"
    objects.objects.clear()
    problem = said(DataError)
    assert problem.what == "s3://bkt/p holds nothing"
    assert (
        problem.expected == ".txt or .jsonl; or what `threefold data prepare --to` has written"
    )
    assert problem.fix == "--data.source s3://bkt/p   (or another prefix of the bucket)"
