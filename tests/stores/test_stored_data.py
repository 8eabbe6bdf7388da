"""Training data in a store: the same losses as from a disk on any mesh, damage named, absence waited for."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import warm
from ranks.runs import command, curve, environment, prepare
from stores.conftest import BUCKET, SECRET, Server
from threefold.data.store import blocks
from threefold.data.store.blocks import Blocks
from threefold.data.store.store import TokenStore
from threefold.errors import ThreefoldError
from threefold.places import prefetch
from threefold.places.fetched import fetched
from threefold.places.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.stores, pytest.mark.usefixtures("_no_secret_is_printed")]
STEADY = (
    "--optimizer.schedule",
    "constant",
    "--checkpoint.every",
    "4",
    "--data.tokenizer",
    "bytes",
)
SMALL_BLOCK = 4096
# At random, beside each object in every way.
NUM_DAMAGES = 500


@pytest.fixture
def _no_secret_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


def small_blocks() -> None:
    """A corpus of some kilobytes has several blocks."""
    blocks.BLOCK_BYTES = SMALL_BLOCK


@pytest.fixture
def here(seaweed: Server, use: Any, tmp_path: Path) -> Path:
    use(seaweed.environ())
    prepare(tmp_path)
    return tmp_path


@pytest.fixture
def place(here: Path, address: str) -> ObjectStore:
    return prepare_twice(here, address)


def prepare_twice(here: Path, address: str) -> ObjectStore:
    """The place of a token store that is prepared there, and as `disk` in the folder."""
    words = ("data", "prepare", "--data.source", "corpus", "--data.tokenizer", "bytes")
    for to in ("disk", address):
        done = command(here, *words, "--to", to, first=small_blocks)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"use it: threefold train --data.source {address} --data.tokenizer bytes" in done.stdout
    )
    return open_store(address, os.environ)


def train(folder: Path, *arguments: str, code: int = 0) -> str:
    done = command(folder, "train", "config.yaml", *STEADY, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_reads_from_a_store_what_it_reads_from_a_disk(
    here: Path, place: ObjectStore, address: str
) -> None:
    """Begun at the address on two ranks, gone on from the disk on one, and from the address again with workers."""
    said = train(
        here, "--data.source", address, "--mesh.dp", "2", "--train.steps", "4", "--log.dir", "a"
    )
    assert f"a step of {address}, " in said and "data blocks: " in said
    train(
        here, "--data.source", "disk", "--mesh.dp", "1", "--train.steps", "8", "--log.dir", "a"
    )
    more = ("--data.source", address, "--data.num_workers", "1", "--mesh.dp", "2")
    train(here, *more, "--train.steps", "12", "--log.dir", "a")
    train(
        here, "--data.source", "disk", "--mesh.dp", "2", "--train.steps", "4", "--log.dir", "b"
    )
    train(
        here, "--data.source", "disk", "--mesh.dp", "1", "--train.steps", "8", "--log.dir", "b"
    )
    train(
        here, "--data.source", "disk", "--mesh.dp", "2", "--train.steps", "12", "--log.dir", "b"
    )
    assert curve(here / "a") == curve(here / "b")
    # On a machine that has none of it.
    shutil.rmtree(here / "cache/threefold/stored")
    for words in (
        "data audit",
        "data audit --contents",
        "report",
        "data order --step 3 --show",
        "why --step 3",
        "hash",
        "sample",
    ):
        first, *rest = words.split()
        name, rest = ((rest[0],), rest[1:]) if first == "data" else ((), rest)
        done = command(here, first, *name, "a", *rest)
        assert done.returncode == 0, words + done.stdout + done.stderr


def damaged(place: ObjectStore, key: str, how: str, chance: random.Random) -> None:
    """Damages an object: a byte, its end, its place, its presence, or puts a version there that was before."""
    (data, _), keys = place.get(key) or (b"", ""), [each.key for each in place.list()]
    other = next(each for each in sorted(keys) if each != key and each.startswith("tokens"))
    if how == "missing":
        return place.delete([key])
    if how == "byte":
        at = chance.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    elif how == "cut":
        changed = data[: chance.randrange(len(data))]
    elif how == "longer":
        changed = data + b"x"
    else:
        changed = (place.get(other) or (b"", ""))[0]
    place.write(key, changed)


def test_whatever_is_damaged_is_named(here: Path, place: ObjectStore, address: str) -> None:
    """Every object in every way, and many random bytes: read through in this process, as a run reads it."""
    chance = random.Random(20261126)
    objects = {
        each.key: place.get(each.key) for each in place.list() if each.key.startswith("tokens")
    }
    assert objects.pop("tokens.parts")  # the proof of its preparation, which no run reads
    assert set(objects) == {"tokens.bin", "tokens.idx", "tokens.json", "tokens.blocks"}
    cases = [
        (key, how) for key in objects for how in ("byte", "cut", "longer", "swapped", "missing")
    ]
    cases += [
        (chance.choice([*objects]), chance.choice(["byte", "byte", "byte", "cut"]))
        for _ in range(NUM_DAMAGES)
    ]
    for key, how in cases:
        damaged(place, key, how, chance)
        with pytest.raises(ThreefoldError) as raised:
            tokens(here, address)
        assert key in str(raised.value) and address in str(raised.value), (
            key,
            how,
            str(raised.value),
        )
        content = objects[key]
        assert content is not None
        place.write(key, content[0])
    disk = TokenStore(here / "disk/tokens")
    assert tokens(here, address).tobytes() == disk.tokens.tobytes()


def tokens(here: Path, address: str) -> Any:
    """All tokens of a store, read with an empty cache."""
    shutil.rmtree(here / "new", ignore_errors=True)
    store = TokenStore(fetched(address, os.environ, here / "new", Blocks.parse))
    assert store.document_ends[-1] == store.num_tokens
    return store.read(0, store.num_tokens)


def test_a_run_names_what_was_damaged(here: Path, place: ObjectStore, address: str) -> None:
    data, _ = place.get("tokens.bin") or (b"", "")
    place.write("tokens.bin", data[:5000] + b"?" + data[5001:])
    for more in ((), ("--data.num_workers", "1"), ("--mesh.dp", "2")):
        said = train(here, "--data.source", address, "--log.dir", "a", *more, code=1)
        assert f"{address}/tokens.bin has changed since it was hashed: block 1 of " in said, (
            said
        )
        assert said.count("expected: the bytes as they were prepared") == 1
        shutil.rmtree(here / "a", ignore_errors=True)


def test_a_store_of_another_version_is_named(
    here: Path, place: ObjectStore, address: str
) -> None:
    """What was sent anew, and whole, is not what the run began with."""
    train(here, "--data.source", address, "--train.steps", "4", "--log.dir", "a")
    text = (here / "corpus/part-1.txt").read_text()
    (here / "corpus/part-1.txt").write_text(text.replace("word1 ", "word2 "))
    place.delete([each.key for each in place.list()])
    words = (
        "data",
        "prepare",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
        "--to",
        address,
    )
    assert command(here, *words, first=small_blocks).returncode == 0
    said = train(here, "--data.source", address, "--train.steps", "8", "--log.dir", "a", code=2)
    assert "the saved state has data = " in said
    audit = command(here, "data", "audit", "a")
    assert audit.returncode == 1 and f"{address}/tokens.bin" in audit.stderr, (
        audit.stdout + audit.stderr
    )


@pytest.mark.timing
def test_a_store_that_is_away_is_waited_for(here: Path, address: str, seaweed: Server) -> None:
    """Stopped in the middle of a run: a stall that is named, and no error; the losses are those of the disk."""
    for number in range(4, 40):  # more than some steps have read before it is stopped
        shutil.copy(here / f"corpus/part-{number % 4}.txt", here / f"corpus/part-{number}.txt")
    prepare_twice(here, address)
    words = (
        "--data.seq_len",
        "512",
        "--log.stall_s",
        "3",
        "--mesh.dp",
        "2",
        "--train.steps",
        "40",
    )
    arguments = (
        "train",
        "config.yaml",
        *STEADY,
        *words,
        "--data.source",
        address,
        "--log.dir",
        "a",
    )
    with warm.Running(
        warm.threefold, here, arguments, environment(here), first=one_step_ahead
    ) as running:
        running.wait_for(lambda: "step  1/40" in running.out(), "a step", 120)
        os.kill(seaweed.pid, signal.SIGSTOP)
        try:
            running.wait_for(lambda: f"waiting for {address}" in running.err(), "the stall", 60)
            until = time.monotonic() + 15
            while time.monotonic() < until:
                assert running.running(), running.out() + running.err()
                time.sleep(0.5)  # not to synchronise: that long it is away
        finally:
            os.kill(seaweed.pid, signal.SIGCONT)
        assert running.wait(120) == 0, running.err()
    train(here, *words, "--data.source", "disk", "--log.dir", "b")
    assert curve(here / "a") == curve(here / "b")


def one_step_ahead() -> None:
    """So that a small store is not there before it is stopped."""
    small_blocks()
    prefetch.AHEAD_STEPS = 1


@pytest.mark.parametrize("who", ["reader"])
def test_reading_needs_no_right_to_write(
    here: Path, place: ObjectStore, address: str, seaweed: Server, use: Any, who: str
) -> None:
    use(seaweed.environ(who))
    train(here, "--data.source", address, "--train.steps", "2", "--log.dir", "a")
    words = (
        "data",
        "prepare",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
        "--to",
        f"{address}-2",
    )
    done = command(here, *words)
    assert (
        done.returncode == 2
        and "these credentials may not do that (403 AccessDenied)" in done.stderr
    ), done.stderr


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("s3:/x", "s3:/x is not the address of a store"),
        (
            f"s3://{BUCKET}/tests/nothing-here",
            f"s3://{BUCKET}/tests/nothing-here holds nothing",
        ),
        ("s3://no-such-bucket-here/a", "there is no bucket no-such-bucket-here"),
    ],
)
def test_what_is_no_store_is_refused(here: Path, source: str, what: str) -> None:
    said = train(here, "--data.source", source, "--log.dir", "a", code=2)
    assert what in said and said.count("  fix: ") == 1, said
    assert not (here / "a/metrics.jsonl").exists()


def test_text_is_read_from_a_store_as_from_a_disk(here: Path, address: str) -> None:
    """A folder with one below it, and a pattern; what has changed since is another source."""
    place = open_store(address, os.environ)
    for name in ("a.jsonl", "more/b.jsonl", "c.txt", "LICENSE"):
        text = f"{name} ".encode() * 600
        content = b"".join(
            json.dumps({"text": f"{name} {i} " * 20}).encode() + b"\n" for i in range(40)
        )
        (here / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "texts" / name).write_bytes(content if name.endswith("jsonl") else text)
        place.write(name, (here / "texts" / name).read_bytes())
    for number, below in enumerate(("", "/*.jsonl")):
        for name, source in (("a", f"{address}{below}"), ("b", f"texts{below}")):
            said = train(
                here,
                "--data.source",
                source,
                "--train.steps",
                "2",
                "--log.dir",
                f"{name}{number}",
            )
            assert f"data   {source} (bytes)" in said, said
        assert curve(here / f"a{number}") == curve(here / f"b{number}")
    place.write(
        "more/b.jsonl", (here / "texts/more/b.jsonl").read_bytes().replace(b"39", b"40")
    )
    said = train(
        here, "--data.source", address, "--train.steps", "4", "--log.dir", "a0", code=2
    )
    assert "data" in said and said.count("  fix: ") == 1, said
    train(here, "--data.source", f"{address}/*.jsonl", "--train.steps", "4", "--log.dir", "a1")


def test_one_prefix_is_written_once(here: Path, place: ObjectStore, address: str) -> None:
    words = (
        "data",
        "prepare",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
        "--to",
        address,
    )
    before = {each.key: each.etag for each in place.list()}
    done = command(here, *words, first=small_blocks)
    assert done.returncode == 0 and f"{address}/tokens.bin already exists" in done.stdout, (
        done.stderr
    )
    shutil.rmtree(here / "cache/threefold/tokens")  # as on another host, which makes it again
    done = command(here, *words, first=small_blocks)
    assert done.returncode == 0 and f"{address}/tokens.bin is made" in done.stdout, done.stderr
    (here / "another.txt").write_text("something else\n")
    done = command(here, *words, "--data.source", "another.txt")
    assert done.returncode == 2 and f"{address} holds " in done.stderr, done.stderr
    assert {each.key: each.etag for each in place.list()} == before


def test_a_mixture_and_an_evaluation_of_both_kinds(
    here: Path, place: ObjectStore, address: str
) -> None:
    config = (here / "config.yaml").read_text()
    (here / "config.yaml").write_text(config.replace("source: corpus, ", ""))
    mixture = "{{a: {{source: {a}, weight: 2}}, b: {{source: corpus, weight: 1}}}}"
    for name, source in (("a", address), ("b", "disk")):
        both = (
            "--data.mixture",
            mixture.format(a=source),
            "--eval.source",
            source,
            "--eval.every",
            "4",
        )
        train(here, *both, "--train.steps", "8", "--log.dir", name)
    assert curve(here / "a") == curve(here / "b")
    evals = [
        re.findall(r'"eval_loss": [^,]*', (here / name / "metrics.jsonl").read_text())
        for name in "ab"
    ]
    assert evals[0] == evals[1] and evals[0]


def test_rows_with_a_loss_mask_keep_it(here: Path, address: str) -> None:
    """Pairs of prompts and answers: the same labels, and a mask that was damaged is named."""
    lines = [
        {"prompt": f"question {number} ", "completion": f"answer {number * number}"}
        for number in range(400)
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("data", "prepare", "--data.source", "rows.jsonl", "--data.tokenizer", "bytes")
    for to in ("disk", address):
        done = command(here, *words, "--to", to, first=small_blocks)
        assert done.returncode == 0, done.stdout + done.stderr
    for name, source in (("a", address), ("b", "disk")):
        train(
            here,
            "--data.source",
            source,
            "--data.seq_len",
            "64",
            "--train.steps",
            "4",
            "--log.dir",
            name,
        )
    assert curve(here / "a") == curve(here / "b")
    place = open_store(address, os.environ)
    mask, _ = place.get("tokens.loss_mask") or (b"", "")
    place.write("tokens.loss_mask", mask[:9] + bytes([mask[9] ^ 1]) + mask[10:])
    shutil.rmtree(here / "cache/threefold/stored")
    said = train(
        here, "--data.source", address, "--data.seq_len", "64", "--log.dir", "c", code=1
    )
    assert f"{address}/tokens.loss_mask has changed" in said
