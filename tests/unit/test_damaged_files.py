"""Files of every kind, cut and with flipped bytes: each outcome is a named error, or rows that are intact.

Where a checksum covers the contents (.gz, pages of .parquet), whatever is read is exact. Elsewhere a flipped byte can
make another valid text of the row that it is in, and a cut can end a text early; no other row may change or move. In a
.zst that was written without a checksum, as here, it can change anything, and still ends in no traceback.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from threefold.data.store.open_source import open_text
from threefold.data.text import rows as text_rows
from threefold.data.text.source import MAX_PROBLEMS, ReadLog, Source, log_error
from threefold.errors import DataError
from unit.test_text_kinds import PACK, as_csv, as_lines, as_list

TEXTS = [
    f"row {number}: " + 'words and, é "quotes"\n'[: 5 + number % 20] * (1 + number % 4)
    for number in range(60)
]


def as_parquet(texts: list[str]) -> bytes:
    made = pyarrow.BufferOutputStream()
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(
        table, made, row_group_size=10, compression="zstd", write_page_checksum=True
    )
    return bytes(made.getvalue().to_pybytes())


KINDS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": lambda texts: "\n".join(texts).encode(),
    ".jsonl": as_lines,
    ".json": as_list,
    ".csv": as_csv,
    ".parquet": as_parquet,
}
CASES = [
    (suffix, packed)
    for suffix in KINDS
    for packed in PACK
    if (suffix, packed)[0] != ".parquet" or not packed
]
# Nothing else guards the rows of these.
CHECKED = {".gz"}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A copy that is cut, has some flipped bits, a stretch of zeros, or a stretch that is missing."""
    changed, at = bytearray(content), chance.randrange(1, len(content))
    how = chance.choice(["cut", "flip", "zeros", "hole"])
    if how == "cut":
        return bytes(changed[:at])
    if how == "flip":
        for _ in range(chance.choice([1, 1, 3])):
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        size = chance.randrange(1, 40)
        changed[at : at + size] = bytes(len(changed[at : at + size])) if how == "zeros" else b""
    return bytes(changed)


def outcome(path: Path, *, skip_bad: bool) -> tuple[list[str], ReadLog]:
    """The texts and the log; a DataError as preparing it ends with."""
    source, log = (
        open_text(Source(str(path), skip_bad_lines=skip_bad)),
        ReadLog(skip_bad=skip_bad),
    )
    texts = [text for piece in source.pieces for text in source.read(piece, log)]
    if log.num_bad:
        error = log_error(source, log)
        assert 0 < len(error.problems) <= MAX_PROBLEMS
        raise error
    return texts, log


def others(found: list[str], whole: list[str]) -> int:
    """How many of the texts that were found are none of the whole file's, or not in its order."""
    left, count = iter(whole), 0
    for text in found:
        rest = list(left)
        if text in rest:
            left = iter(rest[rest.index(text) + 1 :])
        else:
            left, count = iter(rest), count + 1
    return count


@pytest.mark.parametrize(("suffix", "packed"), CASES, ids=lambda value: value or "plain")
def test_damage_is_named_or_the_rows_are_intact(
    tmp_path: Path, suffix: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE_BYTES", 256)
    path, whole = tmp_path / f"a{suffix}{packed}", PACK[packed](KINDS[suffix](TEXTS))
    path.write_bytes(whole)
    intact, _ = outcome(path, skip_bad=False)
    assert intact == (TEXTS if suffix != ".txt" else ["\n".join(TEXTS)])
    num_refused = 0
    for seed in range(20):
        path.write_bytes(damaged(whole, random.Random(f"{suffix}{packed}{seed}")))
        for skip_bad in (False, True):
            try:
                found, log = outcome(path, skip_bad=skip_bad)
            except DataError as error:
                num_refused += 1
                assert all(
                    re.search(rf"a{re.escape(suffix + packed)}\b", each.what)
                    for each in error.problems
                ), error
                # One damaged file among others is skipped; a .parquet whose columns have other names is no damage.
                assert not (skip_bad and packed) and (
                    not skip_bad or "data.fields.text" in error.problems[0].what
                )
                continue
            if packed in CHECKED or suffix == ".parquet":
                assert others(found, intact) == 0
            elif suffix != ".txt" and packed != ".zst":
                # A stretch may be the end of one row and the beginning of the next; quotes may join some.
                assert others(found, intact) <= 4, (seed, found)
                assert len(found) + log.num_skipped <= len(intact) + 4
    assert num_refused or (suffix, packed) == (".txt", "")


def test_damaged_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"id": list(range(60)), "text": TEXTS}).save_to_disk(
        tmp_path / "saved"
    )
    (path,) = (tmp_path / "saved").glob("*.arrow")
    whole = path.read_bytes()
    for seed in range(20):
        path.unlink()  # mapped by what was opened before
        path.write_bytes(damaged(whole, random.Random(f"saved {seed}")))
        try:
            found, _ = outcome(tmp_path / "saved", skip_bad=False)
        except DataError as error:
            assert all("saved" in each.what for each in error.problems), error
        else:
            assert others(found, TEXTS) <= 12  # 40 bytes hold the ends of ten texts
