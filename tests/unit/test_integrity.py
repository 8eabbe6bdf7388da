"""Seals: whatever changes in a file is found, and ranks share the reading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.checkpoint.seal import (
    Seal,
    SealedWriter,
    checksum_of,
    shares,
    write_sealed,
    wrong_checksums,
    wrong_sizes,
)


def test_seal_is_of_the_whole_content(tmp_path: Path) -> None:
    writer = SealedWriter(tmp_path / "file")
    for piece in (b"a" * 20_000_000, b"", b"b"):
        writer.write(piece)
    seal = writer.close()
    content = (tmp_path / "file").read_bytes()
    assert content == b"a" * 20_000_000 + b"b"
    assert seal == Seal(20_000_001, checksum_of(content))
    assert Seal.from_json(seal.to_json()) == seal


def test_every_bit_counts(tmp_path: Path) -> None:
    content = os.urandom(40)
    seals = {"file": write_sealed(tmp_path / "file", content)}
    assert wrong_checksums(tmp_path, seals, ["file"]) is None
    for bit in range(320):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "file").write_bytes(changed)
        assert wrong_checksums(tmp_path, seals, ["file"]) == (
            "the content of file has changed: its checksum is not the one it was written with"
        )
        assert wrong_sizes(tmp_path, seals) is None


def test_size_and_absence_are_named(tmp_path: Path) -> None:
    seals = {"file": write_sealed(tmp_path / "file", b"x" * 1234)}
    (tmp_path / "file").write_bytes(b"x")
    assert wrong_sizes(tmp_path, seals) == "file has 1 bytes, not 1,234"
    (tmp_path / "file").unlink()
    assert wrong_sizes(tmp_path, seals) == "file: No such file or directory"
    assert wrong_checksums(tmp_path, seals, ["file"]) == "file: No such file or directory"
    (tmp_path / "file").mkdir()
    assert wrong_checksums(tmp_path, seals, ["file"]) == "file: Is a directory"


@pytest.mark.parametrize(
    "values", [None, 5, "ab", [], [1], ["1", "a"], [1, 2], [True, "a"], [1, "a", 3], {}]
)
def test_seal_that_is_none(values: Any) -> None:
    with pytest.raises(ValueError, match="is not a size and a checksum"):
        Seal.from_json(values)


@given(st.dictionaries(st.text(), st.integers(0, 10**12), max_size=40), st.integers(1, 12))
def test_shares_are_all_files_once_and_about_equal(
    sizes: dict[str, int], num_ranks: int
) -> None:
    seals = {name: Seal(size, "") for name, size in sizes.items()}
    parts = shares(seals, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_failed_write_closes_its_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_sealed(tmp_path / "file", 5)  # type: ignore[arg-type]
