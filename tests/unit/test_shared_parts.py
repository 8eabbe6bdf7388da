"""Parts that tasks on many hosts make: whatever dies, runs twice or is damaged, the store is that of one process."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from threefold.data.store import parts, parts_proof, prepare, shared_parts
from threefold.data.store.open_source import open_text
from threefold.data.store.parts import EncodedPart, PartDone, PartMaker
from threefold.data.store.prepare import PARTS, PreparedStore, request_of
from threefold.data.store.shared_parts import SharedParts
from threefold.data.text.source import Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError
from unit.test_prepare import contents, corpus  # noqa: F401

BYTES = ByteTokenizer()
NUM_PARTS, NUM_TASKS = 20, 3


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task makes its parts itself: a forked one is its own worker."""

    def make(
        maker: SharedParts, its: Sequence[EncodedPart], num_workers: int
    ) -> Iterator[PartDone]:
        yield from map(maker.make, its)

    monkeypatch.setattr(shared_parts, "make_in_processes", make)


def shared_of(source: Path, to: Path) -> SharedParts:
    text = open_text(Source(str(source)))
    return SharedParts(
        PartMaker(text, BYTES, to / f"{PARTS}{request_of(text, BYTES, skip_bad=False)}", False),
        None,
    )


def task(source: Path, to: Path, index: int, before: Callable[[], None] | None = None) -> int:
    if before is not None:
        before()
    return shared_of(source, to).make_share(index, NUM_TASKS, num_workers=1)


def join(source: Path, to: Path, shared: SharedParts | None = None) -> PreparedStore:
    """As `data prepare --task join`, and without `shared` as the command alone."""
    make = shared.collect if shared else None
    record = partial(parts_proof.write, to / "tokens")
    return prepare.prepare(
        open_text(Source(str(source))), BYTES, to=to, make=make, record=record
    )


@pytest.fixture
def whole(corpus: Path, tmp_path: Path) -> dict[str, bytes]:  # noqa: F811
    """What one process makes of the corpus."""
    join(corpus, tmp_path / "whole")
    made = contents(tmp_path / "whole")
    assert set(made) == {
        "tokens.bin",
        "tokens.blocks",
        "tokens.idx",
        "tokens.json",
        "tokens.parts",
    }
    return made


def die_at(number: int, first: bool) -> None:
    """This process is killed before its `number`-th rename, or right after it."""
    rename, left = os.replace, [number]

    def replace(*paths: Any) -> None:
        left[0] -= 1
        if not left[0] and first:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]


def begun(*arguments: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=task, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("seed", range(4))
def test_killed_and_doubled_tasks_make_the_store_of_one_process(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    whole: dict[str, bytes],
    seed: int,
) -> None:
    """40 kills over the seeds, at each rename of a part; some of them beside a copy of the same task that lives."""
    chance, to, kills = random.Random(seed), tmp_path / "to", 0
    while kills < 10:
        index = chance.randrange(NUM_TASKS)
        # A task that has nothing left to do cannot be killed at work.
        its = [
            part for part in shared_of(corpus, to).missing() if part.number % NUM_TASKS == index
        ]
        if not its:
            shutil.rmtree(to / shared_of(corpus, to).maker.folder.name)
            continue
        dying = begun(
            corpus,
            to,
            index,
            partial(die_at, chance.randint(1, min(8, 4 * len(its))), chance.random() < 0.5),
        )
        living = begun(corpus, to, index, None) if chance.random() < 0.2 else None
        dying.join(60)
        if living is not None:
            living.join(60)
            assert living.exitcode == 0
        # Which may have left nothing to do.
        assert dying.exitcode == -signal.SIGKILL or living is not None
        kills += dying.exitcode == -signal.SIGKILL
    shared = shared_of(corpus, to)
    if missing := shared.missing():
        with pytest.raises(DataError, match=f"part {missing[0].number} is missing"):
            join(corpus, to, shared)
    assert sum(task(corpus, to, index) for index in range(NUM_TASKS)) == len(missing)
    join(corpus, to, shared)
    assert contents(to) == whole
    assert task(corpus, to, 0) == 0  # a copy that comes late finds the store
    assert contents(to) == whole


def test_tasks_share_all_parts_among_them(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    assert [task(corpus, tmp_path, index) for index in range(NUM_TASKS)] == [7, 7, 6]
    assert [task(corpus, tmp_path, index) for index in range(NUM_TASKS)] == [0, 0, 0]


def test_a_bad_document_ends_its_task_alone(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    (corpus / "20.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"20\.txt is not UTF-8"):
        task(corpus, tmp_path, 1)
    assert task(corpus, tmp_path, 0) == 7


def _swap(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def _damage(folder: Path, how: str, other: Path) -> None:
    """Does something to part 3, or to parts 3 and 4."""
    here = {kind: folder / f"00003.{kind}" for kind in ("bin", "len", "json")}
    if how == "missing":
        here["json"].unlink()
    elif how == "cut":
        here["bin"].write_bytes(here["bin"].read_bytes()[:-2])
    elif how == "seal":
        here["json"].write_bytes(b"{")
    elif how == "doubled":
        for path in folder.glob("00004.*"):
            shutil.copy(
                path,
                here[path.suffix[1:]]
                if path.suffix[1:] in here
                else folder / f"00003{path.suffix}",
            )
    elif how == "swapped seals":
        _swap(here["json"], folder / "00004.json")
    elif how == "of another source":
        for kind, path in here.items():
            shutil.copy(other / f"00003.{kind}", path)
    elif how == "swapped tokens":
        _swap(here["bin"], folder / "00004.bin")
    else:
        kind, at = how.split()
        data = bytearray(here[kind].read_bytes())
        data[int(at)] ^= 1
        here[kind].write_bytes(data)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("missing", "part 3 is missing"),
        ("cut", "part 3 is truncated, or its seal is another part's"),
        ("seal", r"part 3 is truncated, or its seal is another part's: b'\{'"),
        (
            "doubled",
            r"part 3 is truncated, or its seal is another part's: b'\{\"of\": \"\.parts-\w+\", \"part\": 4",
        ),
        ("swapped seals", r"part 3 is .*\"part\": 4.*; part 4 is .*\"part\": 3"),
        ("of another source", r"part 3 is .*b'\{\"of\": \"\.parts-OTHER"),
        ("swapped tokens", r"00003\.bin is not what was sealed"),
        ("bin 5", r"00003\.bin is not what was sealed"),
        ("len 0", r"00003\.len is not what was sealed"),
    ],
)
def test_a_wrong_part_is_named_and_made_again(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    whole: dict[str, bytes],
    how: str,
    named: str,
) -> None:
    to, shared = tmp_path / "to", shared_of(corpus, tmp_path / "to")
    for index in range(NUM_TASKS):
        task(corpus, to, index)
    shutil.copytree(corpus, tmp_path / "other")
    (tmp_path / "other" / "30.txt").write_text("another one")
    of_other = shared_of(tmp_path / "other", tmp_path / "elsewhere")
    of_other.make(of_other.plan[3])
    _damage(shared.maker.folder, how, of_other.maker.folder)
    with pytest.raises(
        DataError, match=named.replace("OTHER", of_other.maker.folder.name[-32:])
    ) as raised:
        join(corpus, to, shared)
    assert "again: " in raised.value.problems[0].fix
    assert not (to / "tokens.json").exists()
    # As the fix says: the same again. Of two swapped files, the second is found then.
    again = sum(task(corpus, to, index) for index in range(NUM_TASKS))
    assert again == (2 if how == "swapped seals" else 1)
    if how == "swapped tokens":
        with pytest.raises(DataError, match=r"00004\.bin is not what was sealed"):
            join(corpus, to, shared)
        assert sum(task(corpus, to, index) for index in range(NUM_TASKS)) == 1
    join(corpus, to, shared)
    assert contents(to) == whole


@pytest.mark.parametrize("name", ["../planted", "..", "/planted", "a/planted", "link"])
def test_an_archive_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "../planted"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(member)
    (folder := tmp_path / "parts").mkdir()
    deleted: list[str] = []
    place = SimpleNamespace(
        url="s3://bucket", get=lambda key: (content.getvalue(), ""), delete=deleted.extend
    )
    shared: Any = SimpleNamespace(
        _place=place, _key=lambda part: "part", maker=SimpleNamespace(folder=folder)
    )
    part: Any = SimpleNamespace(number=3)
    with pytest.raises(
        DataError, match=r"^s3://bucket/part is not what was written: "
    ) as refused:
        SharedParts._fetch(shared, part)
    assert f"{name!r} is no file of a part" in str(refused.value)
    assert deleted == ["part"] and list(tmp_path.rglob("*")) == [folder]


def test_many_missing_parts_are_counted(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(DataError) as raised:
        join(corpus, tmp_path / "to", shared_of(corpus, tmp_path / "to"))
    (problem,) = raised.value.problems
    assert (
        problem.what
        == "; ".join(f"part {number} is missing" for number in range(5)) + "; and 15 more"
    )
    assert problem.expected == f"the 20 parts of {corpus}, each once, where all hosts write"
    assert (
        problem.fix
        == "run the same   threefold data prepare   again: only these parts are made"
    )


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prefix of a store of 12 labelled rows in 6 parts."""
    monkeypatch.setattr(parts, "PART_BYTES", 150)
    monkeypatch.setattr("threefold.data.text.rows._PIECE_BYTES", 80)
    rows = [
        {"prompt": f"question {i}?", "completion": f"answer {i} " * (i % 4 + 1)}
        for i in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from threefold.data.chat.labeller import labeller_for

    source, to = Source(str(tmp_path / "rows.jsonl")), tmp_path / "chats"
    text = open_text(source, labeller_for(source, BYTES))
    prepare.prepare(text, BYTES, to=to, record=partial(parts_proof.write, to / "tokens"))
    return to / "tokens"


def test_the_proof_counts_pieces_parts_documents_and_tokens(chats: Path) -> None:
    seals = [
        json.loads(line) for line in chats.with_suffix(".parts").read_bytes().splitlines()[:-1]
    ]
    num_pieces, num_tokens = (
        sum(len(seal["pieces"]) for seal in seals),
        sum(seal["num_tokens"] for seal in seals),
    )
    assert len(seals) > 3 and sum(seal["num_documents"] for seal in seals) == 12
    begins = f"proof: the {num_pieces} pieces of the source are in {len(seals)} parts, each in one; their 12 documents"
    begins += f" and {num_tokens:,} tokens are the store's; "
    assert (
        parts_proof.prove(chats, read=False)
        == f"{begins}every digest was equal when they were joined"
    )
    assert parts_proof.prove(chats, read=True) == f"{begins}read again, every digest is equal"
    chats.with_suffix(".parts").unlink()
    assert parts_proof.prove(chats, read=True).startswith(
        f"no proof: {chats.with_suffix('.parts')} is not there"
    )


def test_a_store_that_was_damaged_is_made_again_by_tasks(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    whole: dict[str, bytes],
) -> None:
    to = tmp_path / "whole"
    assert [task(corpus, to, index) for index in range(NUM_TASKS)] == [0] * NUM_TASKS
    (to / "tokens.bin").write_bytes(bytes((to / "tokens.bin").stat().st_size))
    assert sum(task(corpus, to, index) for index in range(NUM_TASKS)) == NUM_PARTS
    assert not join(corpus, to, shared_of(corpus, to)).reused and contents(to) == whole


def _changed_seal(
    number: int, change: Callable[[dict[str, Any]], Any]
) -> Callable[[Path], None]:
    def lie(prefix: Path) -> None:
        path = prefix.with_suffix(".parts")
        seals = [json.loads(line) for line in path.read_bytes().splitlines()]
        change(seals[number])
        path.write_text("".join(json.dumps(seal) + "\n" for seal in seals))

    return lie


def _lines(change: Callable[[list[bytes]], Any]) -> Callable[[Path], None]:
    def lie(prefix: Path) -> None:
        path = prefix.with_suffix(".parts")
        change(lines := path.read_bytes().splitlines(keepends=True))
        path.write_bytes(b"".join(lines))

    return lie


def _byte(suffix: str, at: int) -> Callable[[Path], None]:
    def lie(prefix: Path) -> None:
        data = bytearray(prefix.with_suffix(suffix).read_bytes())
        data[at] ^= 1
        prefix.with_suffix(suffix).write_bytes(data)

    return lie


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a part is left out": (_lines(lambda lines: lines.pop(1)), "it was cut"),
    "the last is left out": (_lines(lambda lines: lines.pop(-2)), "it was cut"),
    "the end is left out": (_lines(lambda lines: lines.pop()), "it was cut"),
    "all is left out": (_lines(lambda lines: lines.clear()), "it was cut"),
    "parts change places": (
        _lines(lambda lines: lines.reverse() or lines.append(lines.pop(0))),
        r"is where part 0 of ",
    ),
    "a part is there twice": (
        _lines(lambda lines: lines.__setitem__(1, lines[0])),
        r"part 0 of \.parts-\w+ is where part 1 of \.parts-\w+ belongs",
    ),
    "a part of another source": (
        _changed_seal(1, lambda seal: seal.update(of=".parts-0")),
        r"part 1 of \.parts-0 is ",
    ),
    "a piece is in two parts": (
        _changed_seal(1, lambda seal: seal["pieces"].insert(0, [0, 0, 80])),
        "part 1: its piece from 0 on does not follow the one before",
    ),
    "a piece is in none": (
        _changed_seal(2, lambda seal: seal["pieces"].pop(0)),
        "part 2: its piece from .* on does not",
    ),
    "a document more": (
        _changed_seal(5, lambda seal: seal.update(num_documents=seal["num_documents"] + 1)),
        r"its parts have 13 documents, .* the store has \(12, ",
    ),
    "a skipped row": (
        _changed_seal(0, lambda seal: seal["log"].update(num_skipped=1)),
        "1 skipped; the store has",
    ),
    "no record": (
        _lines(lambda lines: lines.__setitem__(0, b"{}\n")),
        "it cannot be read: KeyError",
    ),
    "no text": (_lines(lambda lines: lines.__setitem__(0, b"\xff\n")), "it cannot be read: "),
}
READ_LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a token": (
        _byte(".bin", 4),
        r"part 0 \(documents 0 to \d+\) has another bin in the store",
    ),
    "the last token": (
        _byte(".bin", -2),
        r"part \d \(documents \d+ to 11\) has another bin in the store",
    ),
    "a label": (_byte(".loss_mask", 0), r"part 0 .* has another loss_mask in the store"),
    "a length": (_byte(".idx", 34), r"part 0 .* has another len in the store"),
    "a digest": (
        _changed_seal(1, lambda seal: seal["xxh3"].update(len="0" * 32)),
        "part 1 .* has another len",
    ),
}


@pytest.mark.parametrize("lie", [*LIES, *READ_LIES])
def test_a_store_that_is_not_its_parts_is_named(chats: Path, lie: str) -> None:
    damage, named = {**LIES, **READ_LIES}[lie]
    damage(chats)
    if lie in READ_LIES:
        parts_proof.prove(chats, read=False)  # what only reading shows
    with pytest.raises(DataError, match=named) as raised:
        parts_proof.prove(chats, read=lie in READ_LIES)
    (problem,) = raised.value.problems
    assert problem.what.startswith(f"{chats}.parts: ")
    assert (
        problem.fix == "threefold data prepare ... --to ANOTHER   (prepares the source again)"
    )


def test_joined_tokens_are_those_of_the_parts(chats: Path) -> None:
    """What the digests are of: the tokens of the parts, one after the other."""
    seals = [
        json.loads(line) for line in chats.with_suffix(".parts").read_bytes().splitlines()[:-1]
    ]
    tokens, ends = (
        np.fromfile(chats.with_suffix(".bin"), "<u2"),
        np.cumsum([seal["num_tokens"] for seal in seals]),
    )
    import xxhash

    for seal, own in zip(seals, np.split(tokens, ends[:-1]), strict=True):
        assert xxhash.xxh3_128_hexdigest(own.tobytes()) == seal["xxh3"]["bin"]
