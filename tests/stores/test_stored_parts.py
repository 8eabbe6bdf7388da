"""Parts that tasks put at an address: kills at random moments, copies at once, damage; the store is that of a disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from ranks import warm
from ranks.runs import command, environment
from stores.conftest import SECRET, Server
from threefold.data.store import parts, shared_parts
from threefold.data.store.blocks import Blocks
from threefold.data.store.parts import EncodedPart, PartDone
from threefold.data.store.shared_parts import SharedParts
from threefold.data.text import rows
from threefold.places.object_store import ObjectStore, open_store

pytestmark = [
    pytest.mark.stores,
    pytest.mark.timing,
    pytest.mark.usefixtures("_no_secret_is_printed"),
]

# KILLS=200: more of them.
NUM_KILLS = int(os.environ.get("KILLS", "15"))
NUM_TASKS = 3
WORDS = ("data", "prepare", "--data.source", "rows.jsonl", "--data.tokenizer", "bytes")


@pytest.fixture
def _no_secret_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


def small_parts(dies_within_s: float | None = None) -> None:
    """Parts of some kilobytes, made by this process; which is killed at a moment of its work."""
    parts.PART_BYTES, rows._PIECE_BYTES = 20_000, 7_000
    make = SharedParts.make

    def begin(shared: SharedParts, part: EncodedPart) -> PartDone:
        SharedParts.make = make  # type: ignore[method-assign]
        if dies_within_s is not None:
            dying = threading.Timer(dies_within_s, os.kill, (os.getpid(), signal.SIGKILL))
            dying.daemon = True
            dying.start()
        return make(shared, part)

    def one_after_the_other(
        shared: SharedParts, its: Sequence[EncodedPart], num_workers: int
    ) -> Iterator[PartDone]:
        for part in its:
            yield shared.make(part)

    SharedParts.make = begin  # type: ignore[method-assign]
    shared_parts.make_in_processes = one_after_the_other  # type: ignore[assignment]


@pytest.fixture
def here(seaweed: Server, use: Callable[[dict[str, str]], None], tmp_path: Path) -> Path:
    """Rows, and the store that one process makes of them on a disk."""
    use(seaweed.environ())
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"text": "row {i} {"word " * (i % 90)}"}}\n' for i in range(3000))
    )
    said(command(tmp_path, *WORDS, "--to", "disk", first=small_parts))
    return tmp_path


def said(done: object, code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr  # type: ignore[attr-defined]
    return str(done.stdout + done.stderr)  # type: ignore[attr-defined]


def prepare(
    here: Path, address: str, *arguments: str, code: int = 0, dies_within_s: float | None = None
) -> str:
    return said(
        command(
            here, *WORDS, "--to", address, *arguments, first=partial(small_parts, dies_within_s)
        ),
        code,
    )


def parts_at(place: ObjectStore) -> list[str]:
    return sorted(each.key for each in place.list())


def require_equal(here: Path, place: ObjectStore) -> None:
    """The store at the address is that of the disk, and nothing else is there."""
    fetched = here / "fetched"
    fetched.mkdir()
    for key in parts_at(place):
        (fetched / key).write_bytes((place.get(key) or (b"", ""))[0])
    (fetched / ".threefold-complete.json").unlink()
    names = {"tokens.bin", "tokens.idx", "tokens.json", "tokens.parts", "tokens.blocks"}
    assert {path.name for path in fetched.iterdir()} == names
    for name in names - {"tokens.blocks"}:
        assert (fetched / name).read_bytes() == (here / "disk" / name).read_bytes(), name
    made, disk = (Blocks.read(folder / "tokens.blocks") for folder in (fetched, here / "disk"))
    assert made and disk and made.digest == disk.digest  # the files' times are in it, too


def test_killed_tasks_and_copies_make_the_store_of_one_process(
    here: Path, address: str
) -> None:
    chance, place, kills, num_parts = (
        random.Random(20261127),
        open_store(address, os.environ),
        0,
        0,
    )
    while kills < NUM_KILLS:
        task = ("--task", f"{chance.randrange(NUM_TASKS)}/{NUM_TASKS}")
        words = (*WORDS, "--to", address, *task)
        dying = partial(small_parts, chance.uniform(0, 0.06))
        with warm.Running(
            warm.threefold, here, words, environment(here), first=dying
        ) as running:
            code = running.wait(60)
            assert code in (0, -signal.SIGKILL), running.err()
        kills += code != 0
        there = parts_at(place)
        assert len(there) >= num_parts, "a part that was there is lost"
        num_parts = len(there)
        # That task is done: some of its parts are taken away.
        if code == 0 and kills < NUM_KILLS:
            place.delete(there[:: chance.randint(1, 3)])
            num_parts = len(parts_at(place))
    words = (*WORDS, "--to", address, "--task", "1/3")
    with warm.Running(
        warm.threefold, here, words, environment(here), first=small_parts
    ) as copy:
        for number in range(NUM_TASKS):
            prepare(here, address, "--task", f"{number}/{NUM_TASKS}")
        assert copy.wait(60) == 0, copy.err()
    assert "proof: the " in prepare(here, address, "--task", "join")
    require_equal(here, place)
    assert "holds " in prepare(here, address, "--task", "0/3", code=2)
    assert "read again, every digest is equal" in said(
        command(here, "data", "audit", "fetched", "--contents")
    )


def test_wrong_parts_are_named_and_made_again(here: Path, address: str) -> None:
    """Each time on a machine that has none of them yet, since what was collected is not fetched again."""
    place, chance = open_store(address, os.environ), random.Random(7)
    prepare(here, address, "--task", "0/1")
    keys = parts_at(place)
    (first, _), (second, _) = (place.get(key) or (b"", "") for key in keys[:2])

    def refused(how: str) -> str:
        shutil.rmtree(here / "cache/threefold/tokens", ignore_errors=True)
        return prepare(here, address, "--task", "join", code=2)

    wrong = {
        "cut": first[:3000],
        "empty": b"",
        "no archive": b"x" * 5000,
        "another part's": second,
    }
    for number in range(2):
        at = chance.randrange(5000, 30000)  # of its tokens
        wrong[f"byte {at}, {number}"] = first[:at] + bytes([first[at] ^ 1]) + first[at + 1 :]
    for how, data in wrong.items():
        place.write(keys[0], data)
        assert f"{address}/{keys[0]} is not what was written: " in refused(how)
        assert "1 parts are made" in prepare(here, address, "--task", "0/1")
        assert place.get(keys[0]) is not None
    place.delete(keys[1:3])
    told = refused("missing")
    assert (
        "part 1 is missing; part 2 is missing\n" in told
        and "again: only these parts are made" in told
    )
    assert "2 parts are made" in prepare(here, address, "--task", "0/1")
    prepare(here, address, "--task", "join")
    require_equal(here, place)
