"""Blocks of a store on this machine: what is kept, who fetches it, what a dead process or a full disk does."""

from __future__ import annotations

import errno
import itertools
import math
import multiprocessing
import os
import random
import shutil
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from threefold.errors import ThreefoldError
from threefold.places import block_cache, prefetch
from threefold.places.block_cache import BlockCache, open_cache
from threefold.places.faults import MissingObject, PlaceError
from threefold.places.known_file import KnownFile
from threefold.places.next_use import Block, NextUses, forecast
from threefold.places.prefetch import Ahead, Prefetch, StepBlocks

BLOCK = 100


def unknown(number: int) -> float:
    return math.inf


class StubPlace:
    """One object; `away`: so many requests that fail, `gate`: what a read waits for, `asked`: the blocks that were."""

    def __init__(self, data: bytes) -> None:
        self.data, self.away, self.asked = data, 0, list[int]()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, key: str, *, start: int, length: int) -> bytes:
        assert self.gate.wait(30)
        if self.away:
            self.away -= 1
            raise PlaceError("s3://b/p: it did not answer", expected="an answer", fix="later")
        self.asked.append(start // BLOCK)
        if len(found := self.data[start : start + length]) != length:
            raise MissingObject(
                f"s3://b/p/{key} ends early",
                expected="the object as it was written",
                fix="look",
            )
        return found


def known_file(
    folder: Path, num_blocks: int, *, room: int, seed: int = 0
) -> tuple[KnownFile, StubPlace]:
    data = random.Random(seed).randbytes(num_blocks * BLOCK - 30)
    hashes = b"".join(
        xxhash.xxh3_128_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)
    )
    folder.mkdir(exist_ok=True)
    cache = BlockCache(folder, block_bytes=BLOCK, num_blocks=room)
    file = KnownFile("s3://b/p", "tokens.bin", len(data), BLOCK, hashes, {}, lambda _: cache)
    place = StubPlace(data)
    file.__dict__["place"] = place
    return file, place


# --- next uses ---


def fewest_fetches(steps: Sequence[Collection[Block]], capacity: int) -> int:
    """The fewest fetches of any choice of what is removed, by trying all of them; steps of one block each."""
    best = {frozenset[Block](): 0}
    for (block,) in steps:
        now: dict[frozenset[Block], int] = {}
        for held, cost in best.items():
            options = [held] if block in held else [held | {block}]
            cost += block not in held
            if len(options[0]) > capacity:
                options = [options[0] - {gone} for gone in held]
            for each in options:
                now[each] = min(cost, now.get(each, cost))
        best = now
    return min(best.values())


@pytest.mark.parametrize("seed", range(30))
def test_a_forecast_is_the_fewest_fetches_of_any_choice(seed: int) -> None:
    chance = random.Random(seed)
    steps = [[(0, chance.randrange(6))] for _ in range(14)]
    for capacity in (1, 2, 3, 6):
        found = forecast(steps, (), capacity=capacity)
        assert found.fetched == fewest_fetches(steps, capacity)
        assert found.uses == 14 and found.hit_rate == 1 - found.fetched / 14


def test_what_is_cached_is_not_fetched() -> None:
    steps = [[(0, 1), (0, 2)], [(0, 1), (1, 2)], []]
    assert forecast(steps, [(0, 1), (5, 5)], capacity=10).fetched == 2
    assert forecast([], [(0, 1)], capacity=1).hit_rate == 1.0


def test_next_uses_are_those_of_the_steps() -> None:
    chance = random.Random(1)
    steps = [[(0, chance.randrange(20)) for _ in range(3)] for _ in range(60)]
    uses = NextUses(iter(steps))
    for now in range(60):
        while uses.num_steps < 10 and uses.look_on():
            pass
        assert uses.num_steps == min(10, 60 - now)
        assert uses.num_uses == sum(len(set(blocks)) for blocks in steps[now : now + 10])
        for block in [(0, number) for number in range(21)]:
            expected = next(
                (k for k, blocks in enumerate(steps[now : now + 10]) if block in blocks),
                math.inf,
            )
            assert uses.steps_until(block) == expected
        uses.advance()
    uses.advance()  # past the end


# --- the cache ---


def test_every_range_is_read_as_it_is(tmp_path: Path) -> None:
    chance = random.Random(2)
    file, place = known_file(tmp_path / "a", 12, room=5)
    for _ in range(300):
        start = chance.randrange(file.size)
        length = chance.randrange(file.size - start + 1)
        assert file.read(start, length) == place.data[start : start + length]
        assert len(file.cache.numbers()) <= 5


def test_what_is_used_last_is_removed(tmp_path: Path) -> None:
    file, _ = known_file(tmp_path / "a", 9, room=4)
    for number in range(9):
        file.fetch(number, lambda each: [5, 1, 9, 2, math.inf, 4, 3, 8, 7][each])
    assert {1, 3}.issubset(file.cache.numbers()) and len(file.cache.numbers()) == 4
    assert not {2, 4, 7}.intersection(file.cache.numbers())


def test_blocks_of_many_processes_are_fetched_once(tmp_path: Path) -> None:
    """Threads here, each with a file of its own as processes have: the locks are the files'."""
    files = [known_file(tmp_path / "a", 20, room=20) for _ in range(6)]
    threads = [threading.Thread(target=file.read, args=(0, file.size)) for file, _ in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain.from_iterable(place.asked for _, place in files)) == list(
        range(20)
    )


def _fetch_and_hold(folder: Path, started: Any) -> None:
    file, place = known_file(folder, 3, room=3)
    place.gate.clear()
    started.put(True)
    file.fetch(1)


def test_a_process_that_dies_while_it_fetches_leaves_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Queue()
    process = context.Process(target=_fetch_and_hold, args=(tmp_path / "a", started))
    process.start()
    assert started.get(timeout=60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    file, place = known_file(tmp_path / "a", 3, room=3)
    assert file.read(0, file.size) == place.data
    started.close()


def test_what_a_killed_process_has_half_written_is_removed(tmp_path: Path) -> None:
    file, place = known_file(tmp_path / "a", 3, room=3)
    old, new = tmp_path / "a/.00000001.1.1.partial", tmp_path / "a/.00000002.1.1.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert file.read(0, file.size) == place.data
    assert not old.exists() and new.exists(), "of a process that may still write"


def test_a_damaged_block_of_the_cache_is_fetched_again(tmp_path: Path) -> None:
    file, place = known_file(tmp_path / "a", 3, room=3)
    file.read(0, file.size)
    other, again = known_file(tmp_path / "a", 3, room=3)
    for damage in (b"x" * BLOCK, b"", place.data[:BLOCK]):
        file.cache.path(1).write_bytes(damage)
        assert other.read(0, file.size) == place.data
        other._checked.clear()
    assert again.asked == [1, 1, 1]


@pytest.mark.parametrize("damage", ["byte", "cut", "swapped"])
def test_a_changed_object_is_named_and_not_kept(tmp_path: Path, damage: str) -> None:
    file, place = known_file(tmp_path / "a", 3, room=3)
    right = place.data
    changed = {"byte": right[:150] + b"?" + right[151:], "cut": right[:170]}
    place.data = changed.get(damage, right[:BLOCK] + right[:BLOCK] + right[2 * BLOCK :])
    assert file.read(0, BLOCK) == right[:BLOCK]
    for _ in range(2):
        with pytest.raises(MissingObject, match=r"s3://b/p/tokens\.bin "):
            file.read(BLOCK, 1)
    assert 1 not in file.cache.numbers()
    assert file.read_again(3) == 1
    place.data = right
    assert file.read(0, file.size) == right and file.read_again(3) is None


def test_a_store_that_is_away_for_a_while_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = known_file(tmp_path / "a", 3, room=3)
    place.away = 2
    assert file.read(0, 5) == place.data[:5]
    monkeypatch.setattr("threefold.places.known_file.PATIENCE_S", 0.0)
    place.away = 5
    with pytest.raises(PlaceError, match="it did not answer"):
        file.read(150, 5)


def test_a_full_disk_keeps_what_it_has_and_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First there is room for what one of ours held, then for nothing."""
    file, place = known_file(tmp_path / "a", 8, room=8)
    for number in range(3):
        file.fetch(number)
    write, most = Path.write_bytes, [3]

    def full(self: Path, data: bytes) -> int:
        if len(file.cache.numbers()) >= most[0]:
            write(self, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert file.read(0, file.size) == place.data
    assert len(file.cache.numbers()) == 3 and not list((tmp_path / "a").glob(".*.partial"))
    most[0] = 0
    assert file.read(0, file.size) == place.data and file.cache.numbers() == []
    assert (
        caplog.text.count("caches no more blocks; they are fetched each time they are read")
        == 1
    )


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EACCES])
def test_a_cache_that_cannot_be_written_any_more_is_read_past(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    file, place = known_file(tmp_path / "a", 8, room=8)
    file.fetch(0)
    file.cache.path(0).write_bytes(b"damaged")

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "unlink"):
            patch.setattr(Path, name, refused)
        assert file.read(0, file.size) == place.data
        assert caplog.text.count(f"each time they are read: {os.strerror(number)}") == 1
        patch.setattr(os, "open", refused)
        assert file.read(0, file.size) == place.data
    assert file.read(0, file.size) == place.data


def test_a_cache_that_is_removed_is_read_past(tmp_path: Path) -> None:
    file, place = known_file(tmp_path / "a", 8, room=8)
    file.fetch(0)
    shutil.rmtree(tmp_path / "a")
    assert file.read(0, file.size) == place.data


def test_a_damaged_block_that_appears_while_it_is_fetched_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = known_file(tmp_path / "a", 8, room=8)
    fetch = file.cache.fetch

    def another_was_first(number: int, *arguments: Any) -> bytes:
        file.cache.path(number).write_bytes(bytes(BLOCK))
        return fetch(number, *arguments)

    monkeypatch.setattr(file.cache, "fetch", another_was_first)
    assert file.read(0, file.size) == place.data


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(free: int) -> None:
        monkeypatch.setattr(
            block_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free})()
        )

    left(127 << 20)
    with pytest.raises(ThreefoldError) as raised:
        open_cache(tmp_path / "a", 1000, block_bytes=1 << 20)
    assert f"the disk of {tmp_path / 'a'} has 127 MiB left" in str(raised.value)
    assert "expected: 128 MiB: half" in str(raised.value) and "XDG_CACHE_HOME" in str(
        raised.value
    )
    assert open_cache(tmp_path / "a", 10, block_bytes=1 << 20).num_blocks == 10
    left(512 << 20)
    assert open_cache(tmp_path / "a", 1000, block_bytes=1 << 20).num_blocks == 256
    (tmp_path / "file").write_text("")
    with pytest.raises(ThreefoldError, match="cannot be written: Not a directory"):
        open_cache(tmp_path / "file/a", 10, block_bytes=1 << 20)


# --- ahead of the steps ---


def steps_of(blocks: Sequence[Collection[int]]) -> Iterator[StepBlocks]:
    return (
        StepBlocks(each, each) for each in [[(0, number) for number in step] for step in blocks]
    )


def test_steps_find_their_blocks_and_fetch_as_few_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time and one step ahead, what is fetched is what Belady's rule fetches."""
    monkeypatch.setattr(prefetch, "AHEAD_STEPS", 1)
    chance, room = random.Random(3), 6
    blocks = [[chance.randrange(15)] for _ in range(200)]
    file, place = known_file(tmp_path / "a", 15, room=room)
    ahead = Prefetch({0: file}, steps_of(blocks), waiting=lambda _: None)
    for step in blocks:
        ahead.wait()
        for number in step:
            assert file.has(number)
            start = number * BLOCK
            assert file.read(start, 5) == place.data[start : start + 5]
    ahead.close()
    best = forecast(
        [[(0, number) for number in step] for step in blocks], (), capacity=room
    ).fetched
    assert len(place.asked) == best
    assert ahead.counts.uses == 200 and ahead.counts.in_time == 200 - best


def test_blocks_are_there_before_they_are_asked_for(tmp_path: Path) -> None:
    file, place = known_file(tmp_path / "a", 40, room=40)
    ahead = Prefetch(
        {0: file}, steps_of([[number] for number in range(40)]), waiting=lambda _: None
    )
    ahead.wait()
    while len(place.asked) < prefetch.AHEAD_STEPS:
        threading.Event().wait(0.001)
    assert sorted(place.asked) == list(range(prefetch.AHEAD_STEPS))
    for _ in range(39):
        ahead.wait()
    ahead.wait()  # past the end
    ahead.close()
    assert sorted(place.asked) == list(range(40)), "each once"


def test_steps_without_rows_have_no_end_and_are_not_looked_through(tmp_path: Path) -> None:
    """As an order has them after its last epoch, with a cache that does not hold the file."""
    file, place = known_file(tmp_path / "a", 9, room=4)
    steps = itertools.chain(steps_of([[0], [1]]), itertools.repeat(StepBlocks((), ())))
    ahead = Prefetch({0: file}, steps, waiting=lambda _: None)
    for _ in range(5):
        ahead.wait()
    ahead.close()
    assert sorted(place.asked) == [0, 1]


def test_a_step_that_waits_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_REPORTED_AFTER_S", 0.01)
    file, place = known_file(tmp_path / "a", 4, room=4)
    place.gate.clear()
    phases = list[str]()
    ahead = Ahead[int]({0: file}, lambda step: ([step], [step]), lambda row: (0, [row]))

    def enter(phase: str) -> None:
        phases.append(phase)
        place.gate.set()

    ahead.enter = enter
    assert list(ahead.there(lambda: iter(range(4)))) == [0, 1, 2, 3]
    assert phases[:2] == ["data: waiting for s3://b/p", "data"]
    assert ahead.counts.uses == 4 and ahead.counts.waited_s > 0
    ahead.close()


def test_the_step_that_reads_a_damaged_block_says_so(tmp_path: Path) -> None:
    file, place = known_file(tmp_path / "a", 4, room=4)
    place.data = place.data[: 2 * BLOCK] + bytes(BLOCK) + place.data[3 * BLOCK :]
    ahead = Prefetch({0: file}, steps_of([[0], [1], [2], [3]]), waiting=lambda _: None)
    ahead.wait()
    ahead.wait()
    with pytest.raises(MissingObject, match="block 2 of 4"):
        ahead.wait()
    ahead.close()


def test_facts_are_what_the_steps_will_fetch(tmp_path: Path) -> None:
    file, _ = known_file(tmp_path / "a", 10, room=10)
    ahead = Ahead[int](
        {1: file}, lambda step: ([step], [step, -1, 100]), lambda row: (row < 100, [row % 10])
    )
    file.fetch(0)
    assert ahead.facts(iter(range(20))) == {
        "address": "s3://b/p",
        "cache_bytes": 10 * BLOCK,
        "steps": 20,
        "bytes_a_step": BLOCK,
        "fetched_bytes_a_step": round(9 / 20 * BLOCK),
        "hit_rate": 1 - 9 / 20,
    }
