"""Runs with a copy in a store: what is there after any end, who may write, and what a machine without the disk gets."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ranks import warm
from ranks.own_runs import in_a_run
from ranks.runs import command, curve, environment, prepare
from ranks.spawn import run_ranks
from stores.conftest import SECRET, Server, free_ports, weed_server
from threefold.checkpoint.checkpoint_folder import Checkpoint, find
from threefold.mesh import local_ranks
from threefold.places import snapshot
from threefold.places.faults import MissingObject
from threefold.places.head import KEY, RunHead, _written, read_head
from threefold.places.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.stores, pytest.mark.usefixtures("_no_secret_is_printed")]
# Of a run whose rate does not depend on its length.
STEADY = ("--optimizer.schedule", "constant", "--checkpoint.every", "4")
# Of a checkpoint's objects, at random.
NUM_DAMAGES = 500
# Of a run and its ranks; of a sender, and of a server, in proportion. More: THREEFOLD_KILLS=100.
NUM_KILLS = int(os.environ.get("THREEFOLD_KILLS", "8"))
# Of runs that are started together. More: THREEFOLD_PAIRS=100.
NUM_PAIRS = int(os.environ.get("THREEFOLD_PAIRS", "2"))


@pytest.fixture
def _no_secret_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


@pytest.fixture
def here(seaweed: Server, use: Any, tmp_path: Path) -> Path:
    use(seaweed.environ())
    prepare(tmp_path)
    return tmp_path


@pytest.fixture
def place(here: Path, address: str) -> ObjectStore:
    return open_store(address, os.environ)


def train(folder: Path, *arguments: str, code: int = 0) -> str:
    done = command(folder, "train", "config.yaml", *STEADY, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout + done.stderr


def head_of(place: ObjectStore) -> RunHead:
    there = read_head(place)
    assert there is not None
    return there[0]


def stored_steps(place: ObjectStore, scratch: Path) -> list[int]:
    """The steps of all checkpoints that the head names, each of them read back and whole in every byte."""
    if (there := read_head(place)) is None:
        return []
    for each in there[0].checkpoints:
        shutil.rmtree(scratch, ignore_errors=True)
        files = snapshot.read_seal(place, each.name, each.seal)
        snapshot.fetch(place, files, scratch)
        assert snapshot.damage(place, files, scratch) is None
        assert Checkpoint(scratch / "checkpoint", each.step).damage() is None
    return [each.step for each in there[0].checkpoints]


def num_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("bytes", "KiB", "MiB").index(unit)


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["id"])


def test_a_run_goes_on_without_its_disk(here: Path, place: ObjectStore, address: str) -> None:
    """dp 4 is stored, dp 2 x tp 2 goes on from the store in a new folder, then one rank: one run, with one's curve."""
    store = ("--checkpoint.store", address)
    wide = ("--model.config", "{model_type: llama, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 4, "
            "num_attention_heads: 4, num_key_value_heads: 2}")  # fmt: skip
    train(
        here,
        *store,
        *wide,
        "--mesh.dp",
        "4",
        "--mesh.dp_shard",
        "4",
        "--train.steps",
        "8",
        "--log.dir",
        "a",
    )
    assert stored_steps(place, here / "scratch") == [4, 8]
    (here / "a").rename(here / "gone")
    said = train(
        here,
        *store,
        *wide,
        "--mesh.dp",
        "2",
        "--mesh.tp",
        "2",
        "--train.steps",
        "12",
        "--log.dir",
        "b",
    )
    sizes = re.search(r"fetched (\S+ \S+) in all; the most by one rank: (\S+ \S+)", said)
    assert sizes
    read, most = map(num_bytes, sizes.groups())
    assert most <= 1.001 * read / 4
    before, now = (here / name / "checkpoints/step-00000008" for name in ("gone", "b"))
    assert {
        path.relative_to(before): path.read_bytes()
        for path in before.rglob("*")
        if path.is_file()
    } == {path.relative_to(now): path.read_bytes() for path in now.rglob("*") if path.is_file()}
    # Of dp 2 x tp 2 a rank holds half of each split tensor; all four read a quarter each.
    state = sum(path.stat().st_size for path in now.rglob("*.safetensors"))
    assert most <= 1.1 * state / 2
    print(f"{read:,.0f} bytes read, of a state of {state:,}; the most by one rank {most:,.0f}")
    train(here, *store, *wide, "--mesh.dp", "1", "--train.steps", "14", "--log.dir", "c")
    train(here, *wide, "--mesh.dp", "1", "--train.steps", "14", "--log.dir", "d")
    assert {run_id(here / name) for name in "bc"} == {run_id(here / "gone")}
    for (loss, norm), (true_loss, true_norm) in zip(
        curve(here / "c"), curve(here / "d"), strict=True
    ):
        assert abs(loss - true_loss) <= 1e-4 and abs(norm / true_norm - 1) <= 1e-3
    assert stored_steps(place, here / "scratch") == [12, 14]
    for name in ("data audit", "report", "verify"):
        words = ("verify", "--against", "d", "c") if name == "verify" else (*name.split(), "c")
        done = command(here, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    written = [path for path in here.rglob("*") if path.is_file() and "cache" not in path.parts]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert [
        each.key
        for each in place.list()
        if SECRET.encode() in place.read(each.key, start=0, length=each.size)
    ] == []
    hashes = [
        command(here, "hash", name).stdout.split()[0]
        for name in ("c", "c/checkpoints/step-00000014")
    ]
    assert hashes[0] == hashes[1]


def test_same_mesh_goes_on_bit_for_bit(here: Path, address: str) -> None:
    store = ("--checkpoint.store", address, "--mesh.dp", "2")
    train(here, *store, "--train.steps", "4", "--log.dir", "a")
    shutil.rmtree(here / "a")
    train(here, *store, "--train.steps", "8", "--log.dir", "b")
    train(here, "--mesh.dp", "2", "--train.steps", "8", "--log.dir", "whole")
    assert curve(here / "b") == curve(here / "whole")


def test_a_fork_reads_a_store_and_leaves_it(
    here: Path, place: ObjectStore, address: str
) -> None:
    train(
        here,
        "--checkpoint.store",
        address,
        "--mesh.dp",
        "2",
        "--train.steps",
        "8",
        "--log.dir",
        "a",
    )
    before = {each.key: each.etag for each in place.list()}
    names = [each.name for each in head_of(place).checkpoints]
    shutil.rmtree(here / "a")
    for step, asked in ((8, address), (4, f"{address}/checkpoints/{names[0]}")):
        folder = f"fork-{step}"
        fork = ("--checkpoint.resume", asked, "--mesh.dp", "1", "--log.dir", folder)
        said = train(here, *fork, "--train.steps", str(step + 2))
        assert f"steps  {step + 1} to {step + 2}" in said
        origin = json.loads((here / folder / "run.json").read_text())["origin"]
        assert origin["step"] == step
        assert not list((here / folder).glob(".fork-of-*")), (
            "its own checkpoint is what it resumes now"
        )
        # Asked again by the same command, the fork resumes itself.
        assert f"steps  {step + 3} to" in train(here, *fork, "--train.steps", str(step + 4))
    assert {each.key: each.etag for each in place.list()} == before
    said = train(here, "--checkpoint.resume", f"{address}/nothing", "--log.dir", "e", code=2)
    assert f"{address}/nothing holds no checkpoint of a run\n" in said and "\n  fix: " in said
    assert not (here / "e").exists()


def test_what_is_refused(here: Path, place: ObjectStore, address: str) -> None:
    store = ("--checkpoint.store", address, "--mesh.dp", "1")
    train(here, *store, "--train.steps", "4", "--log.dir", "a")
    train(here, "--mesh.dp", "1", "--train.steps", "4", "--log.dir", "other")
    shutil.copytree(here / "a", here / "copy")
    objects = {each.key for each in place.list()}
    for arguments, said in (
        (("--log.dir", "other"), "other holds run "),
        (
            ("--log.dir", "new", "--checkpoint.resume", "never"),
            "holds a run, and checkpoint.resume is never",
        ),
        (
            ("--log.dir", "new", "--checkpoint.resume", "other"),
            "holds a run, and checkpoint.resume is other",
        ),
    ):
        text = train(here, *store, *arguments, code=2)
        assert said in text and "\n  fix: " in text, text
    assert not (here / "new").exists() and not (here / "other/.lease.json").exists()
    assert {each.key for each in place.list()} == objects and not head_of(place).lease.held
    train(here, *store, "--train.steps", "8", "--log.dir", "a")
    text = train(here, *store, "--train.steps", "12", "--log.dir", "copy", code=2)
    assert (
        f"the run in copy has continued elsewhere, according to checkpoint.store = {address}"
        in text
    )


def test_commands_read_a_run_in_a_store(here: Path, place: ObjectStore, address: str) -> None:
    """As from its folder: the newest checkpoint, or one by its name, with its weights only where they are read."""
    words = (
        "--checkpoint.store",
        address,
        "--mesh.dp",
        "2",
        "--log.dir",
        "a",
        "--checkpoint.keep",
        "9",
    )
    words += ("--eval.source", "corpus", "--train.steps")
    train(here, *words, "8")

    def printed(words: str, run: str = "", code: int = 0) -> str:
        done = command(here, *words.replace("RUN", run).split())
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stderr if code else done.stdout)

    for words_of in (
        "data audit RUN",
        "data order RUN --step 3",
        "data show RUN --row 0",
        "why RUN",
    ):
        # Beside the name: a copy of the records has no checkpoints of the chain.
        there, on_disk = (
            [
                line
                for line in printed(words_of, run).splitlines()[1:]
                if "checkpoints of them" not in line
            ]
            for run in (address, "a")
        )
        assert there == on_disk, words_of
    printed("report RUN", address)
    # How it ended was not sent.
    assert (
        f"as it was when {address}/checkpoints/step-00000008-"
        in (here / "report.html").read_text()
    )
    assert "gone without a message" not in command(here, "explain", address).stdout
    copies = here / "cache/threefold/runs"
    assert [*copies.glob("**/metrics.jsonl")] and not [*copies.glob("**/*.safetensors")]

    def hashed(path: str) -> str:
        return str(json.loads(printed("hash RUN --json", path))["sha256"])

    named = {
        each.step: f"{address}/checkpoints/{each.name}" for each in head_of(place).checkpoints
    }
    assert (
        hashed(named[4])
        == hashed("a/checkpoints/step-00000004")
        != hashed(address)
        == hashed("a")
    )
    printed("export RUN --to exported", address)
    assert hashed("exported") == hashed("a")
    assert printed("sample RUN --tokens 5", address) == printed("sample RUN --tokens 5", "a")
    losses = [json.loads(printed("eval RUN --json", run)) for run in (address, "a")]
    assert losses[0]["metrics"] == losses[1]["metrics"]
    # The run goes on, and what is read of it with it; the copy of before is gone.
    train(here, *words, "12")
    assert hashed(address) == hashed("a") and hashed(named[8]) != hashed("a")
    assert len(
        [*copies.glob("*/*/checkpoints/step-00000012/COMPLETE")]
    ) == 0 and "step 12" in printed("hash RUN", address)

    assert f"{address}/other holds no checkpoint of a run" in printed(
        "hash RUN", f"{address}/other", code=2
    )
    for words_of in ("view RUN", "resume RUN", "profile RUN"):
        assert f"{address} is an address of a store" in printed(words_of, address, code=2), (
            words_of
        )
    key = next(
        each.key
        for each in place.list()
        if "step-00000012" in each.key and "safetensors" in each.key
    )
    shutil.rmtree(copies)
    data, _ = place.get(key) or (b"", "")
    place.write(key, data[:-1] + b"?")
    assert key in printed("hash RUN", address, code=2)


def test_a_run_of_a_program_goes_on_without_its_disk(
    here: Path, place: ObjectStore, address: str
) -> None:
    """As one that was never stopped; and a fork of it."""

    def run(folder: str, until: int, **config: str) -> list[Any]:
        keys = {f"checkpoint.{name}": value for name, value in config.items()}
        numbers, ended = run_ranks(
            partial(in_a_run, config=keys), 2, {"dp": 2}, str(here / folder), until
        )[0]
        assert ended == 0, ended
        return list(numbers)

    whole = run("whole", 8)
    assert run("a", 5, store=address) == whole[:5]
    assert head_of(place).checkpoints[-1].step == 5 and not head_of(place).lease.held
    shutil.rmtree(here / "a")
    assert run("b", 8, store=address) == whole[5:]
    assert stored_steps(place, here / "scratch")[-1] == 8
    assert run_id(here / "b") == (head_of(place).identity or {})["id"]
    fork = f"{address}/checkpoints/{head_of(place).checkpoints[-1].name}"
    assert len(run("fork", 10, resume=fork)) == 2 and run_id(here / "fork") != run_id(
        here / "b"
    )


def test_of_two_runs_on_one_prefix_one_is_refused(
    here: Path, place: ObjectStore, address: str
) -> None:
    """Started together, and one while the other runs; then again, since what a run has ended is free at once."""
    environment(here)
    for attempt in range(NUM_PAIRS):
        words = (
            "train",
            "config.yaml",
            *STEADY,
            "--checkpoint.store",
            f"{address}/{attempt}",
            "--mesh.dp",
            "1",
        )
        words += ("--train.steps", "40")
        with ThreadPoolExecutor(2) as pool:
            both = list(
                pool.map(
                    lambda name, words=words: command(here, *words, "--log.dir", name),
                    ("a", "b"),
                )
            )
        assert sorted(done.returncode for done in both) == [0, 2], [
            done.stderr for done in both
        ]
        refused = next(done for done in both if done.returncode)
        assert f"checkpoint.store = {address}/{attempt} is in use: process " in refused.stderr
        for name in "ab":
            shutil.rmtree(here / name, ignore_errors=True)


def test_a_run_whose_lease_was_taken_stops_before_its_next_save(
    here: Path, place: ObjectStore, address: str
) -> None:
    words = (
        "train",
        "config.yaml",
        *STEADY,
        "--checkpoint.store",
        address,
        "--mesh.dp",
        "2",
        "--log.dir",
        "a",
    )
    words += (
        "--train.steps",
        "100000",
        "--checkpoint.on_error",
        "continue",
        "--checkpoint.keep",
        "100",
    )
    with warm.Running(
        warm.threefold, here, words, environment(here), one_output=True
    ) as running:
        until = time.monotonic() + 60
        while (
            not ((there := read_head(place)) and there[0].checkpoints)
            and time.monotonic() < until
        ):
            time.sleep(0.1)
        _change_head(
            place,
            lambda before: replace(
                before, lease=replace(before.lease, owner="another", who="process 1 on another")
            ),
        )
        names = [each.name for each in head_of(place).checkpoints]
        assert running.wait(60) == 1
        said = running.out()
    assert f"{address}: process 1 on another writes there\n" in said
    assert "expected: one run at a time below a prefix" in said
    assert [each.name for each in head_of(place).checkpoints] == names
    assert head_of(place).lease.owner == "another" and head_of(place).lease.held


def test_a_store_that_is_away_for_a_while_delays_no_step(
    here: Path, seaweed: Server, place: ObjectStore, address: str
) -> None:
    words = (
        "train",
        "config.yaml",
        *STEADY,
        "--checkpoint.store",
        address,
        "--mesh.dp",
        "2",
        "--log.dir",
        "a",
    )
    with warm.Running(
        warm.threefold, here, (*words, "--train.steps", "60"), environment(here)
    ) as running:
        running.wait_for(lambda: "step  2/60" in running.out(), "a step", 60)
        os.kill(seaweed.pid, signal.SIGSTOP)
        try:
            running.wait_for(lambda: "step 60/60" in running.out(), "the last step", 60)
            time.sleep(3)
            assert running.running(), "the end waits for the upload"
        finally:
            os.kill(seaweed.pid, signal.SIGCONT)
        assert running.wait(120) == 0, running.err()
    assert stored_steps(place, here / "scratch")[-1] == 60
    slowest = max(
        json.loads(line)["step_time_s"]
        for line in (here / "a/metrics.jsonl").read_text().splitlines()[1:]
    )
    assert slowest < 3


def test_what_a_killed_upload_left_out_is_sent_by_the_next_start(
    here: Path, place: ObjectStore, address: str
) -> None:
    """Its objects and seal are there, and the head does not name them; also where there is nothing to train."""
    words = ("--checkpoint.store", address, "--mesh.dp", "2", "--log.dir", "a", "--train.steps")
    train(here, *words, "8")
    for steps in ("8", "10"):
        _change_head(place, lambda before: replace(before, checkpoints=before.checkpoints[:1]))
        train(here, *words, steps)
        assert 8 in stored_steps(place, here / "scratch")


def test_whatever_of_a_checkpoint_is_damaged_is_named(
    here: Path, place: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte, an end, an object in another's place, or one that is gone: none is taken for what was sent."""
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 2000)
    chance, name, files = random.Random(20261127), "step-00000004-abc", {}
    for number, size in enumerate((9000, 3000, 1)):
        (here / "sent").write_bytes(chance.randbytes(size))
        file = f"{snapshot.STATE}state/rank-{number:05d}.safetensors"
        files[file] = snapshot.send(place, name, file, here / "sent")
    seal = snapshot.seal(place, snapshot.Snapshot(name, 4, snapshot.PIECE_BYTES, files))
    objects = {each.key: (place.get(each.key) or (b"", ""))[0] for each in place.list()}
    assert len(objects) == 9

    def problem() -> str | None:
        shutil.rmtree(here / "there", ignore_errors=True)
        try:
            whole = snapshot.read_seal(place, name, seal)
            snapshot.fetch(place, whole, here / "there")
        except (snapshot.StoredDamage, MissingObject) as error:
            return error.problems[0].what
        return snapshot.damage(place, whole, here / "there")

    for _ in range(NUM_DAMAGES):
        key, how = (
            chance.choice([*objects]),
            chance.choice(["byte", "byte", "cut", "swapped", "missing"]),
        )
        data = objects[key]
        at = chance.randrange(len(data))
        if how == "missing":
            place.delete([key])
        else:
            changed = {
                "byte": data[:at]
                + bytes([data[at] ^ 1 << chance.randrange(8)])
                + data[at + 1 :],
                "cut": data[:at],
                "swapped": objects[chance.choice([other for other in objects if other != key])],
            }
            place.write(key, changed[how])
        found = problem()
        assert found is not None and key in found, (key, how, found)
        place.write(key, data)
    assert problem() is None


def soon_over() -> None:
    """What a killed rank leaves is not waited for as long as a run would."""
    local_ranks._END_WITHIN_S = 3.0


def test_kills_lose_nothing_that_was_stored(
    here: Path, place: ObjectStore, address: str
) -> None:
    """SIGKILL of all processes, or of one, at random moments; then the same folder, or a new one without a disk."""
    chance, stored, folder, kills = random.Random(20261126), 0, here / "run-0", 0
    words = (
        "train",
        "config.yaml",
        *STEADY,
        "--checkpoint.store",
        address,
        "--train.steps",
        "100000",
    )
    until = time.monotonic() + 10 * NUM_KILLS
    while kills < NUM_KILLS and time.monotonic() < until:
        mesh = (
            "--mesh.dp",
            str(chance.choice((1, 2))),
            "--mesh.tp",
            "1",
            "--checkpoint.every",
            "1",
        )
        if chance.random() < 0.4 and kills:
            # Nobody can know that the owner has ended: its lease is waited for, unless it is known to be free.
            _change_head(
                place, lambda before: replace(before, lease=replace(before.lease, held=False))
            )
            shutil.rmtree(folder)
            folder = here / f"run-{kills}"
        arguments = (*words, *mesh, "--log.dir", str(folder))
        with warm.Running(
            warm.threefold,
            here,
            arguments,
            environment(here),
            one_output=True,
            first=soon_over,
        ) as running:
            running.wait_for(lambda running=running: "\nstep " in running.out(), "a step", 60)
            assert running.running(), running.out()
            time.sleep(chance.uniform(0, 1.5))
            members = [pid for pid in processes(running.process) if pid != running.process]
            if chance.random() < 0.3 and members:
                os.kill(chance.choice(members), signal.SIGKILL)
            else:
                os.killpg(running.process, signal.SIGKILL)
            assert running.wait(60) != 0
        kills += 1
        steps = stored_steps(place, here / "scratch")
        assert (steps or [0])[-1] >= stored, "a checkpoint that was stored is lost"
        stored = (steps or [0])[-1]
    assert kills >= 5 and stored > kills
    newest = max(stored, find(folder).step)  # the disk's may be the nearer one
    train(here, *words[4:-1], str(newest + 2), "--mesh.dp", "1", "--log.dir", str(folder))
    assert stored_steps(place, here / "scratch")[-1] == newest + 2
    named = {each.name for each in head_of(place).checkpoints} | set(head_of(place).aside)
    assert {each.key.split("/")[1] for each in place.list("checkpoints")} == named, (
        "what was killed is removed"
    )
    assert find(folder).step == newest + 2
    print(f"{kills} kills, newest step {newest}")


def test_a_sender_that_is_killed_again_and_again_loses_nothing(
    here: Path, place: ObjectStore, address: str
) -> None:
    """Without a training around it: a kill about every second, and each time all that was stored is whole."""
    chance, kills, stored, until = random.Random(36), 0, 0, time.monotonic() + 2.5 * NUM_KILLS
    (here / "run").mkdir()
    program = [
        sys.executable,
        str(Path(__file__).parent / "sending.py"),
        address,
        str(here / "run"),
    ]
    while time.monotonic() < until:
        with subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            time.sleep(chance.uniform(0.3, 1.2))
            process.kill()
            said, _ = process.communicate()
        kills += 1
        assert "Traceback" not in said, said
        steps = stored_sent(place, here / "scratch")
        told = [int(line.split()[1]) for line in said.splitlines() if line.startswith("stored")]
        assert max(steps, default=0) >= max([stored, *told]), "what it has told is stored"
        stored = max(steps, default=0)
    print(f"{kills} kills, newest step {stored}")
    assert kills > 5 and stored > 5


def test_a_server_that_is_killed_again_and_again_loses_nothing(
    tmp_path: Path, use: Any, address: str
) -> None:
    """While a process sends to it, which waits until it is there again."""
    chance, first, stored, said = random.Random(37), free_ports(4), 0, tmp_path / "said"
    for name in ("server", "run"):
        (tmp_path / name).mkdir()
    program = [
        sys.executable,
        str(Path(__file__).parent / "sending.py"),
        address,
        str(tmp_path / "run"),
    ]
    sender = None
    try:
        for _ in range(max(2, NUM_KILLS // 4)):
            with weed_server(tmp_path / "server", first) as server:
                use(server.environ())
                if sender is None:
                    with said.open("w") as out:
                        sender = subprocess.Popen(program, stdout=out, stderr=out)
                # It removes what another has followed, so it stands still while that is read.
                sender.send_signal(signal.SIGSTOP)
                told = [
                    int(line.split()[1])
                    for line in said.read_text().splitlines()
                    if line.startswith("stored")
                ]
                steps = stored_sent(open_store(address, os.environ), tmp_path / "scratch")
                sender.send_signal(signal.SIGCONT)
                assert max(steps, default=0) >= max([stored, *told]), (
                    "what it has told is stored"
                )
                stored, until = max(steps, default=0), time.monotonic() + 60
                while (
                    not (more := said.read_text().count("stored") > len(told) + 2)
                    and time.monotonic() < until
                ):
                    time.sleep(0.1)
                assert more and sender.poll() is None, said.read_text()
                time.sleep(chance.uniform(0, 0.5))
    finally:
        if sender is not None:
            sender.kill()
            sender.wait()
    assert "Traceback" not in said.read_text(), said.read_text()


def stored_sent(place: ObjectStore, scratch: Path) -> list[int]:
    """As `stored_steps`, of folders that are no checkpoints of a run."""
    there = read_head(place)
    for each in there[0].checkpoints if there else ():
        shutil.rmtree(scratch, ignore_errors=True)
        whole = snapshot.read_seal(place, each.name, each.seal)
        snapshot.fetch(place, whole, scratch)
        assert snapshot.damage(place, whole, scratch) is None
    return [each.step for each in there[0].checkpoints] if there else []


def processes(group: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(path.parent.name))
    return found


def _change_head(place: ObjectStore, change: Callable[[RunHead], RunHead]) -> None:
    while True:
        there = read_head(place)
        assert there is not None
        changed = change(
            replace(there[0], lease=replace(there[0].lease, beat=there[0].lease.beat + 1))
        )
        if place.swap(KEY, _written(changed), etag=there[1]):
            return
