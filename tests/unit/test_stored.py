"""Checkpoints in a store, against a server that does wrong: what is damaged is named, and of two writers one adds."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from store_stub import StubStore, serving
from threefold.errors import CheckpointError, ConfigError, ThreefoldError
from threefold.places import head, mirror, run_copy, snapshot
from threefold.places.faults import PlaceError
from threefold.places.head import (
    HeldHead,
    LeaseLost,
    RunHead,
    StoredCheckpoint,
    read_head,
    take,
)
from threefold.places.lease import FILE, give_back, take_lease
from threefold.places.mirror import Mirror, Sent, SentFiles, UploadError
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.restore import Restore, checkpoints_of, forget_interrupted, restore
from threefold.places.run_copy import RunCopies
from threefold.places.snapshot import RECORDS, STATE, Snapshot, StoredDamage

URL = "s3://runs/a/b"


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def place(store: StubStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 1000)
    monkeypatch.setattr(mirror, "PIECE_BYTES", 1000)
    with serving(store) as endpoint:
        values = {
            "AWS_ACCESS_KEY_ID": "AKIDOFTEST",
            "AWS_SECRET_ACCESS_KEY": "5ecret",
            "AWS_REGION": "us-east-1",
        }
        for name, value in {**values, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield open_store(URL, os.environ, retry_s=1)


@pytest.fixture
def taken(place: ObjectStore) -> Iterator[Callable[..., HeldHead]]:
    """Takes the lease of the prefix; what is left is ended."""
    held: list[HeldHead] = []

    def take_it(
        owner: str = "me", *, dead: Callable[[str], bool] = lambda owner: False
    ) -> HeldHead:
        held.append(take(place, owner, f"process of {owner}", dead=dead, say=lambda line: None))
        return held[-1]

    yield take_it
    for each in held:
        each._ended.set()


class Alone:
    """One rank, or one of several in threads that have a store in common."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        return json.loads(json.dumps(make()))

    def decide_on(
        self, name: str, make: Callable[[], Any], conclude: Callable[[list[Any]], Any]
    ) -> Any:
        return conclude([make()])


def folder_of(
    path: Path, step: int, sizes: tuple[int, ...] = (2500, 1000, 1, 0)
) -> dict[str, Path]:
    """A folder like a checkpoint's, and its files by their names in a store."""
    chance, files = random.Random(step), {}
    for number, size in enumerate(sizes):
        file = path / f"step-{step:08d}/state/rank-{number:05d}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.randbytes(size))
        files[f"{STATE}state/{file.name}"] = file
    (path / "journal.jsonl").write_text(f"{step}\n" * 100)
    return {**files, f"{RECORDS}journal.jsonl": path / "journal.jsonl"}


def sent(place: ObjectStore, files: dict[str, Path], step: int) -> StoredCheckpoint:
    name = f"step-{step:08d}-abc"
    stored = {file: snapshot.send(place, name, file, path) for file, path in files.items()}
    whole = Snapshot(name, step, snapshot.PIECE_BYTES, stored)
    return StoredCheckpoint(name, step, snapshot.seal(place, whole))


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7, 50])
def test_shares_are_equal_and_make_the_whole(
    place: ObjectStore, tmp_path: Path, num_shares: int
) -> None:
    files = folder_of(tmp_path / "run", 4)
    whole = snapshot.read_seal(place, sent(place, files, 4).name)
    shares = [
        snapshot.fetch(place, whole, tmp_path / "there", share=(index, num_shares))
        for index in range(num_shares)
    ]
    total = sum(path.stat().st_size for path in files.values())
    assert sum(shares) == total and max(shares) - min(shares) <= 1
    assert {name: (tmp_path / "there" / name).read_bytes() for name in files} == {
        name: path.read_bytes() for name, path in files.items()
    }
    assert all(
        snapshot.damage(place, whole, tmp_path / "there", share=(index, num_shares)) is None
        for index in range(num_shares)
    )


def test_pieces_are_whole_objects(
    place: ObjectStore, store: StubStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request begins an upload in parts, of which a killed writer would leave some; a file may end early."""
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 10 * 2**20)
    (tmp_path / "big").write_bytes(bytes(25 * 2**20))
    assert len(snapshot.send(place, "step-1-a", "big", tmp_path / "big").pieces) == 3
    assert not [request for request in store.requests if request.startswith("POST")]
    stat = Path.stat

    def longer(path: Path, **options: Any) -> Any:
        return type("Stat", (), {"st_size": stat(path).st_size + 7})

    monkeypatch.setattr(Path, "stat", longer)
    assert snapshot.send(place, "step-1-a", "big", tmp_path / "big").size == 25 * 2**20


def test_whatever_is_wrong_is_named(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead], tmp_path: Path
) -> None:
    """Every object of a checkpoint, changed, cut, emptied, grown, swapped and removed: nothing is taken for whole."""
    files, chance = folder_of(tmp_path / "run", 8), random.Random(1)
    added = [sent(place, folder_of(tmp_path / "run", 4), 4), sent(place, files, 8)]
    taken().update(lambda before: replace(before, checkpoints=tuple(added)))
    good, cases = dict(store.objects), 0
    keys = [key for key in good if f"/{added[1].name}/" in key]
    assert len(keys) == 7

    def changed(data: bytes) -> bytes:
        place = chance.randrange(len(data))
        return (
            data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        )

    ways: dict[str, Callable[[bytes], bytes | None]] = {
        **{f"changed {number}": changed for number in range(10)},
        "cut": lambda data: data[:-1],
        "emptied": lambda data: b"",
        "removed": lambda data: None,
        "of another step": lambda data: good[key.replace(added[1].name, added[0].name)],
        "of another key": lambda data: good[next(other for other in keys if other != key)],
    }
    for key in keys:
        for way, damage in ways.items():
            store.objects = dict(good)
            now = damage(good[key])
            if now == good[key]:
                continue
            store.objects.pop(key)
            store.objects.update({key: now} if now is not None else {})
            said: list[str] = []
            wanted = Restore(
                checkpoints_of(place, None), str(tmp_path / "there"), whole=True, records=("",)
            )
            restore(wanted, place, Alone(), said.append)
            assert said[-1].startswith("fetched"), "the older one is taken"
            skipped = next(line for line in said if line.startswith("skipped"))
            assert key.removeprefix("a/b/") in skipped, (way, key, skipped)
            assert (tmp_path / "there/checkpoints/step-00000004").is_dir()
            (tmp_path / "there").rename(tmp_path / f"there-{(cases := cases + 1)}")
            # By its name no older one is taken.
            with pytest.raises(StoredDamage, match=added[1].name):
                restore(
                    replace(wanted, candidates=checkpoints_of(place, added[1].name)),
                    place,
                    Alone(),
                    said.append,
                )
            assert not (tmp_path / "there").exists()
    assert cases > 90


def test_a_damaged_head_is_named(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead]
) -> None:
    taken().update(
        lambda before: replace(
            before, checkpoints=(StoredCheckpoint("step-00000004-a", 4, "f"),)
        )
    )
    key, chance = f"a/b/{head.KEY}", random.Random(2)
    good = store.objects[key]
    for case in range(90):
        at = chance.randrange(len(good))
        store.objects[key] = (
            good[:at]
            if case % 3 == 0
            else good[:at] + bytes([good[at] ^ 1 << case % 8]) + good[at + 1 :]
        )
        with pytest.raises(CheckpointError, match="cannot be read: "):
            read_head(place)
    store.objects[key] = good
    assert read_head(place) is not None


def test_one_seal_is_put_and_the_head_knows_it(place: ObjectStore, tmp_path: Path) -> None:
    added = sent(place, folder_of(tmp_path, 4), 4)
    assert snapshot.read_seal(place, added.name, added.seal).step == 4
    other = Snapshot(added.name, 4, 1000, {})
    with pytest.raises(PlaceError, match="exists, from another writer"):
        snapshot.seal(place, other)
    # Another one in its place, whole by itself.
    place.write(f"checkpoints/{added.name}/sealed.json", head.checked_text(other.to_values()))
    assert snapshot.read_seal(place, added.name) == other
    with pytest.raises(StoredDamage, match="its checksum is not the one in the head"):
        snapshot.read_seal(place, added.name, added.seal)


def test_seals_do_not_lead_out_of_the_folder(place: ObjectStore) -> None:
    for name in ("../a", "/a", "a/../../b", ""):
        values = {
            "name": "n",
            "step": 1,
            "piece_bytes": 10,
            "files": {name: {"size": 0, "checksum": "", "pieces": []}},
        }
        place.write("checkpoints/n/sealed.json", head.checked_text(values))
        with pytest.raises(StoredDamage, match="is not a file of a checkpoint"):
            snapshot.read_seal(place, "n")


def test_of_many_writers_one_takes_the_lease(
    place: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "RENEW_S", 0.1)

    def attempt(number: int) -> HeldHead | None:
        try:
            return take(
                place,
                f"owner {number}",
                "a process",
                dead=lambda owner: False,
                say=lambda line: None,
            )
        except ConfigError as error:
            assert "is in use" in str(error)
            return None

    for _ in range(10):
        with ThreadPoolExecutor(6) as pool:
            winners = list(filter(None, pool.map(attempt, range(6))))
        assert len(winners) == 1
        winners[0].release()


def test_a_silent_lease_is_taken_and_its_holder_adds_nothing(
    place: ObjectStore, taken: Callable[..., HeldHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LEASE_S", 1.0)
    monkeypatch.setattr(head, "RENEW_S", 1000.0)
    first = taken("first")
    second = taken("second")
    with pytest.raises(LeaseLost, match="process of second writes there"):
        first.update(lambda before: replace(before, aside=("mine",)))
    assert first.lost is not None and second.update(lambda before: before).aside == ()
    first.release()  # says nothing any more
    there = read_head(place)
    assert there is not None and there[0].lease.owner == "second" and there[0].lease.held
    second.release()
    third = taken("third")  # at once
    third.release()
    with pytest.raises(LeaseLost, match="has released its lease"):
        third.update(lambda before: before)


def test_the_same_folder_takes_its_lease_again_and_a_copy_does_not(
    place: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "RENEW_S", 0.2)
    (tmp_path / "a").mkdir()
    killed = take_lease(place, tmp_path / "a", print)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / FILE).write_bytes((tmp_path / "a" / FILE).read_bytes())
    with pytest.raises(ConfigError, match="is in use"):
        take_lease(place, tmp_path / "copy", print)
    assert not (tmp_path / "copy" / FILE).exists()
    killed._ended.set()  # as if its process had been killed
    killed._renewing.join()
    begun = time.monotonic()
    again = take_lease(place, tmp_path / "a", print)
    assert time.monotonic() - begun < 2
    give_back(again, tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead], ignored: str
) -> None:
    store.ignored.add(ignored)
    with pytest.raises(ThreefoldError, match=f"it ignores {ignored}"):
        taken()
    assert store.objects == {}


def test_a_lost_answer_is_no_lost_lease(
    place: ObjectStore,
    store: StubStore,
    taken: Callable[..., HeldHead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A swap that was carried out, of which nobody was told within the time for retries."""
    held = taken()
    answers, swap = iter([PlaceError("away", expected="", fix="")]), place.swap

    def swap_once(*arguments: Any, **options: Any) -> Any:
        result = swap(*arguments, **options)
        for error in answers:
            raise error
        return result

    monkeypatch.setattr(place, "swap", swap_once)
    with pytest.raises(PlaceError):
        held.update(lambda before: replace(before, aside=("one",)))
    assert held.update(lambda before: replace(before, aside=("one", "two"))).aside == (
        "one",
        "two",
    )


def mirror_of(
    place: ObjectStore,
    held: HeldHead,
    run: Path,
    *,
    keep: int = 2,
    continue_on_error: bool = False,
    best: Callable[[], int | None] = lambda: None,
) -> Mirror:
    def describe(each: Sent) -> SentFiles:
        files = {
            name: path
            for name, path in folder_of(run, each.step).items()
            if name.startswith(STATE)
        }
        sums = {
            name: snapshot.xxhash.xxh3_128_hexdigest(path.read_bytes())
            for name, path in files.items()
        }
        described = {name: (0, path.stat().st_size, sums[name]) for name, path in files.items()}
        return SentFiles(
            f"{each.folder.name}-x",
            described,
            {f"{RECORDS}journal.jsonl": run / "journal.jsonl"},
        )

    return Mirror(
        Alone(),
        dist.HashStore(),
        place,
        keep=keep,
        continue_on_error=continue_on_error,
        held=held,
        run=SimpleNamespace(contents=describe, best=best),
    )


def steps(there: RunHead) -> list[tuple[int, bool]]:
    return [(each.step, each.best) for each in there.checkpoints]


def test_the_newest_and_the_best_are_kept(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead], tmp_path: Path
) -> None:
    held = taken()
    # Step 5 is sent before its evaluation, by which it becomes the best: known with the next one.
    best = iter([1, 1, 1, 4, 4, 5, 5])
    copies = mirror_of(place, held, tmp_path, best=lambda: next(best))
    for step in range(1, 8):
        copies.send(Sent(tmp_path / f"step-{step:08d}", step))
        copies.wait(lambda: None)
    assert steps(held.head) == [(5, True), (6, False), (7, False)] and copies.pinned() == []
    assert {key.split("/")[3] for key in store.objects if "/checkpoints/" in key} == {
        each.name for each in held.head.checkpoints
    }
    # Gone back before: set aside, and kept; what a killed upload has left is removed.
    store.objects[
        "a/b/checkpoints/step-00000009-z/checkpoint/state/rank-00000.safetensors.00000"
    ] = b"1"
    store.objects["a/b/checkpoints/notes/of/mine"] = b"1"
    mirror.begin(held, {"id": "run"}, 6)
    assert steps(held.head) == [(5, True), (6, False)] and held.head.aside == (
        "step-00000007-x",
    )
    assert any("step-00000009-z" in key for key in store.objects), "it may be under way"
    mirror.sweep(held)
    assert any("step-00000007-x" in key for key in store.objects)
    assert not any("step-00000009-z" in key for key in store.objects)
    assert "a/b/checkpoints/notes/of/mine" in store.objects


def test_whole_checkpoints_whose_head_is_gone_are_not_removed(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead], tmp_path: Path
) -> None:
    first = taken()
    mirror.begin(first, {"id": "run"}, 0)
    copies = mirror_of(place, first, tmp_path)
    for step in (4, 8):
        copies.send(Sent(tmp_path / f"step-{step:08d}", step))
        copies.wait(lambda: None)
    first._ended.set()
    del store.objects[f"a/b/{head.KEY}"]
    there = {key for key in store.objects if "/checkpoints/" in key}
    for owner in ("second", "third"):  # the second has made a head
        held = taken(owner)
        with pytest.raises(CheckpointError) as caught:
            mirror.sweep(held)
        (problem,) = caught.value.problems
        assert problem.what == (
            f"{URL}/run-head.json was removed, but {URL}/checkpoints/step-00000008-x is complete"
        )
        assert problem.fix.startswith(f"--checkpoint.resume {URL}/checkpoints/step-00000008-x ")
        held.release()
    assert there == {key for key in store.objects if "/checkpoints/" in key}


def test_a_slow_store_gets_the_newest_and_the_best(
    place: ObjectStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, gate, begins, write = taken(), threading.Event(), threading.Event(), place.write

    def slow(key: str, data: bytes | Path, *, in_parts: bool = True) -> None:
        begins.set()
        gate.wait()
        write(key, data, in_parts=in_parts)

    monkeypatch.setattr(place, "write", slow)
    copies = mirror_of(place, held, tmp_path, keep=5, best=lambda: 3)
    begun = time.monotonic()
    for step in range(1, 8):
        copies.send(Sent(tmp_path / f"step-{step:08d}", step))
        assert begins.wait(10)
    assert time.monotonic() - begun < 0.5, "nobody waits"
    assert set(copies.pinned()) >= {1, 3, 7}
    gate.set()
    copies.wait(lambda: None)
    assert steps(held.head) == [(1, False), (3, True), (7, False)]


@pytest.mark.parametrize("go_on", [False, True])
def test_a_failed_upload_ends_the_run_or_is_printed(
    place: ObjectStore,
    store: StubStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    go_on: bool,
) -> None:
    held = taken()
    copies = mirror_of(place, held, tmp_path, continue_on_error=go_on)
    store.answers["PUT"] = (403, "AccessDenied", 1000)
    copies.send(Sent(tmp_path / "step-00000001", 1))
    if go_on:
        copies.wait(lambda: None)
        said = capsys.readouterr().err
        assert (
            said.startswith("the checkpoint of step 1 is saved but not stored: s3://runs/a/b: ")
            and "fix: " in said
        )
        assert copies.refusal() is None
    else:
        with pytest.raises(UploadError, match="these credentials may not do that") as raised:
            copies.wait(lambda: None)
        assert copies.refusal() is raised.value and raised.value.exit_code == 1
    store.answers.clear()
    assert steps(held.head) == []
    copies.send(Sent(tmp_path / "step-00000002", 2))
    if go_on:
        copies.wait(lambda: None)
        assert steps(held.head) == [(2, False)]


def test_a_library_that_panics_fails_the_upload_and_does_not_end_its_thread(
    place: ObjectStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a library in Rust raises then is no Exception: the run would wait for the upload without an end."""

    class PanicException(BaseException):
        pass

    def panics(*_: Any, **__: Any) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    copies = mirror_of(place, taken(), tmp_path)
    monkeypatch.setattr(place, "write", panics)
    copies.send(Sent(tmp_path / "step-00000001", 1))

    def tick() -> None:
        assert copies._thread is None or copies._thread.is_alive()

    with pytest.raises(UploadError, match="the checkpoint of step 1 is saved but not stored"):
        copies.wait(tick)


def test_a_store_that_is_away_is_waited_for(
    place: ObjectStore, store: StubStore, taken: Callable[..., HeldHead], tmp_path: Path
) -> None:
    held = taken()
    copies = mirror_of(place, held, tmp_path)
    store.answers["PUT"] = (503, "SlowDown", 30)
    copies.send(Sent(tmp_path / "step-00000001", 1))
    copies.wait(lambda: None)
    assert steps(held.head) == [(1, False)]


def test_a_file_that_changed_after_it_was_sealed_is_not_sent_as_it(
    place: ObjectStore, taken: Callable[..., HeldHead], tmp_path: Path
) -> None:
    held = taken()
    copies = mirror_of(place, held, tmp_path)
    describe = copies._run.contents

    def then_change(each: Sent) -> SentFiles:
        described = describe(each)
        path = each.folder / "state/rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return described

    copies._run.contents = then_change  # type: ignore[method-assign]
    copies.send(Sent(tmp_path / "step-00000001", 1))
    with pytest.raises(ThreefoldError, match="has changed since it was saved"):
        copies.wait(lambda: None)
    assert steps(held.head) == []


def test_a_folder_that_was_half_filled_is_filled_again(
    place: ObjectStore, tmp_path: Path
) -> None:
    """Killed at every move: what is there is removed, and the next start gets the same folder."""
    added = sent(place, folder_of(tmp_path / "run", 4), 4)
    wanted = Restore(
        [(added.name, added.seal)],
        str(tmp_path / "new"),
        records=("",),
        files=(("run.json", '{"id": "x"}'),),
    )
    replaced, moves = os.replace, 0
    while True:
        (tmp_path / "new").mkdir(exist_ok=True)
        left = iter(range(moves))

        def killed(*arguments: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            replaced(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", killed)
            try:
                restore(wanted, place, Alone(), lambda line: None)
                break
            except KeyboardInterrupt:
                moves += 1
        forget_interrupted(tmp_path / "new", begun=(tmp_path / "new/run.json").exists())
        assert (
            list((tmp_path / "new").rglob("*.safetensors")) == []
            and not (tmp_path / "new/journal.jsonl").exists()
        )
    assert moves == 3
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "checkpoints",
        "journal.jsonl",
        "run.json",
    ]


def copies_in(folder: Path) -> RunCopies:
    return RunCopies(folder, identity_file="run.json", mark="copied-from.json")


def copied(folder: Path, address: str = URL, say: Callable[[str], None] = print) -> Path:
    return copies_in(folder).of(address, os.environ, state=True, say=say)


@pytest.mark.parametrize(
    "name", ["journal.jsonl", "checkpoints/step-00000004/state/rank-00000.safetensors"]
)
@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
def test_a_damaged_copy_of_a_run_is_fetched_again(
    place: ObjectStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    name: str,
    damage: str,
) -> None:
    added = sent(place, folder_of(tmp_path / "run", 4), 4)
    taken().update(lambda before: replace(before, identity={}, checkpoints=(added,)))
    said: list[str] = []
    path = copied(tmp_path / "cache", say=said.append) / name
    right = path.read_bytes()
    assert copied(tmp_path / "cache", say=said.append) / name == path and len(said) == 2
    path.write_bytes({"byte": b"?" + right[1:], "cut": right[:-1], "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    assert copied(tmp_path / "cache", say=said.append) / name == path
    assert path.read_bytes() == right and len(said) == 4


def test_a_copy_of_a_run_that_goes_on_meanwhile_is_of_its_newest_checkpoint(
    place: ObjectStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run removes what it no longer keeps: first before a seal is read, and then before the pieces are."""
    held = taken()
    added = [sent(place, folder_of(tmp_path / "run", step), step) for step in (4, 8, 12)]
    held.update(lambda before: replace(before, identity={}, checkpoints=(added[0],)))
    read_seal, asked = snapshot.read_seal, list[str]()

    def and_go_on(place: ObjectStore, name: str, seal: str | None) -> Snapshot:
        asked.append(name)
        found = read_seal(place, name, seal) if len(asked) == 2 else None
        if len(asked) < 3:
            newer = replace(held.head, checkpoints=(added[len(asked)],))
            held.update(lambda before: newer)
            snapshot.remove(place, [name])
        return found or read_seal(place, name, seal)

    monkeypatch.setattr("threefold.places.run_copy.read_seal", and_go_on)
    there = copied(tmp_path / "cache")
    assert asked == [each.name for each in added]
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step-00000012"]
    snapshot.remove(place, asked)
    with pytest.raises(StoredDamage, match="it is missing"):
        copied(tmp_path / "cache")


def test_a_copy_that_a_command_reads_is_not_removed(
    place: ObjectStore,
    taken: Callable[..., HeldHead],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = [sent(place, folder_of(tmp_path / "run", step), step) for step in (4, 8)]
    taken().update(lambda before: replace(before, identity={}, checkpoints=tuple(added)))
    locks, lock_of = list[int](), run_copy._lock_of
    monkeypatch.setattr(
        run_copy, "_lock_of", lambda copy: locks.append(lock_of(copy)) or locks[-1]
    )
    older = copied(tmp_path / "cache", f"{URL}/checkpoints/{added[0].name}")
    newest = copied(tmp_path / "cache")
    assert len(list(older.rglob("*.safetensors"))) == 4
    for lock in (locks[0], locks[-1]):  # as when both commands have ended
        os.close(lock)
    next(older.rglob("*.safetensors")).unlink()
    assert copied(tmp_path / "cache", f"{URL}/checkpoints/{added[0].name}") == older
    assert not newest.exists()
