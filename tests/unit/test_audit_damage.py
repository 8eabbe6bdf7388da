"""Damaged records of a run: each edit of audit.jsonl is refused in words, or changes nothing that was proved."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_audit import CLEAN, ONE, TWO, record

from threefold.audit.record import Line
from threefold.checkpoint.lineage import Identity, Journal
from threefold.commands.data import audit_lines
from threefold.data.order.mixture import Mixture
from threefold.errors import RunError, ThreefoldError
from threefold.jsonl import MetricsFile

MIXED = record(
    (1, 12, TWO, 8),
    (8, 14, ONE, 8),
    mixture=Mixture({"a": 10, "b": 33}, {"a": 1, "b": 2}, seed=3),
)
SHORT = record((1, 12, TWO, 8))
# Values that a number, a text or a list may become; one of them once ran without end, another was a TypeError.
OTHERS = (
    0,
    -1,
    1,
    5,
    10**12,
    10**30,
    1.5,
    None,
    True,
    "",
    "x",
    "0" * 16,
    "f" * 17,
    "-1",
    [],
    [1],
    ["x"],
    [[1]],
    {},
)


def write(run: Path, lines: list[Any]) -> Path:
    run.mkdir(exist_ok=True)
    records = [line.to_record() if isinstance(line, Line) else line for line in lines]
    (run / "audit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return run


def proved(run: Path) -> list[str]:
    """What is printed, without the meshes, which say who read and not what."""
    return [line for line in audit_lines(run) if " on dp=" not in line]


def edited(text: str, rng: random.Random) -> str:
    """One thing is changed: a byte, a value, a digit, a key, or a line is lost, doubled, moved or cut."""
    lines = text.split("\n")[:-1]
    number = rng.randrange(len(lines))
    kind = rng.choice(
        (
            "byte",
            "value",
            "value",
            "value",
            "item",
            "digit",
            "key",
            "lost",
            "doubled",
            "swapped",
            "cut",
        )
    )
    values = json.loads(lines[number])
    key = rng.choice(list(values))
    if kind == "byte":
        place = rng.randrange(len(lines[number]))
        lines[number] = (
            lines[number][:place]
            + rng.choice('0123456789abcdef"[]{},:')
            + lines[number][place + 1 :]
        )
    elif kind == "digit":
        digits = [place for place, letter in enumerate(lines[number]) if letter.isdigit()]
        place = rng.choice(digits)
        lines[number] = (
            lines[number][:place]
            + rng.choice("0123456789") * rng.randrange(1, 9)
            + lines[number][place:]
        )
    elif kind == "lost":
        del lines[number]
    elif kind == "doubled":
        lines.insert(number, lines[number])
    elif kind == "swapped":
        other = rng.randrange(len(lines))
        lines[number], lines[other] = lines[other], lines[number]
    elif kind == "cut":
        return text[: rng.randrange(len(text))]
    else:
        if kind == "key":
            del values[key]
        elif kind == "item" and isinstance(values[key], list) and values[key]:
            values[key][rng.randrange(len(values[key]))] = rng.choice(OTHERS)
        else:
            values[key] = rng.choice(OTHERS)
        lines[number] = json.dumps(values)
    return "".join(line + "\n" for line in lines)


def meaning(text: str) -> list[Any]:
    """A record's lines without what proves nothing, or is superseded; of a cut one, those that are left."""
    kept = ("kind", "first", "last", "first_step", "epoch", "position")
    lines = (json.loads(line) for line in text.split("\n")[:-1])
    return [{name: value for name, value in line.items() if name in kept} for line in lines]


@pytest.mark.parametrize("name", ["one source", "mixture"])
def test_edits_are_refused_or_change_nothing(tmp_path: Path, name: str) -> None:
    rng, clean = random.Random(11), {"one source": CLEAN, "mixture": MIXED}[name]
    run = write(tmp_path / "run", clean)
    text, whole = (run / "audit.jsonl").read_text(), proved(run)
    refused = 0
    for _ in range(400):
        damaged = edited(text, rng)
        (run / "audit.jsonl").write_text(damaged)
        try:
            found = proved(run)
        except ThreefoldError as error:
            assert "\n  fix: " in str(error)
            refused += 1
            continue
        shorter = text.startswith(damaged) or set(meaning(damaged)[-1].items()) != set(
            meaning(text)[-1].items()
        )
        assert found == whole or shorter, (damaged, found)
    assert refused > 200


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (1, {"last": 10**12}),
        (1, {"faults": 5}),
        (1, {"faults": [5]}),
        (1, {"samples": ["1" * 17] * 2}),
        (0, {"global_batch": 10**12}),
        (0, {"mesh": [1, 1, 10**9, 10**9]}),
        (0, {"position": 10**30}),
        (0, {"data": 7}),
        (0, {"stores": [["source", "digest"]]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_number_is_named_with_its_line(
    tmp_path: Path, place: int, values: dict[str, Any]
) -> None:
    lines = [line.to_record() for line in SHORT]
    lines[place].update(values)
    with pytest.raises(
        RunError, match=rf"audit.jsonl, line {place + 1} is not what a run writes"
    ):
        proved(write(tmp_path / "run", lines))


def test_record_that_ends_before_the_metrics_is_named(tmp_path: Path) -> None:
    """A killed run has steps after its last audit; a whole audit is missing only if the record was cut."""
    run = write(tmp_path / "run", SHORT)
    Journal(run).append("start", start=1, step=0)

    def log(step: int) -> None:
        file = MetricsFile(run / "metrics.jsonl", timed=True)
        file.log({"step": step, "loss": 1.0})
        file.close()

    # Of another start, by a version without times.
    (run / "metrics.jsonl").write_text('{"step": 99, "loss": 1.0}\n')
    for step in (12, 15):
        log(step)
        proved(run)
    write(run, SHORT[:-2])
    with pytest.raises(RunError) as raised:
        proved(run)
    assert str(raised.value) == (
        "the record ends with step 5, but metrics.jsonl has step 15 of the same start\n"
        "  expected: an audit at least every 5 steps: one up to step 10 was lost\n"
        "  fix: restore the file if lines were lost; what was not recorded cannot be proved"
    )
    # A start from step 6 on has logged nothing yet.
    Journal(run).append("start", start=2, step=5)
    proved(run)


def test_record_without_hashes_says_what_is_not_known(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{**line.to_record(), "stores": ()} for line in SHORT])
    assert proved(run)[-2:] == [
        "  bytes of steps 1 to 12: not known, the record has no hashes (--contents reads all)",
        "proved: 96 reads, each by exactly one dp rank in exactly one step: samples",
    ]


def chained(run: Path) -> tuple[Identity, list[dict[str, Any]]]:
    """A run of the starts of CLEAN, and its record's lines, which hold the starts' checksums; no checkpoints."""
    identity, records = Identity.new(), [line.to_record() for line in CLEAN]
    for line in records:
        if line["kind"] == "segment":
            identity = identity.begin(line["first_step"] - 1, None)
            line["link"] = identity.author.link
    identity.write(write(run, records))
    return identity, records


def test_chain_of_starts_is_proved(tmp_path: Path) -> None:
    identity, _ = chained(tmp_path / "run")
    starts = f"{len(identity.starts)} starts, each after the one before"
    assert f"  chain: {starts}; checkpoints of them: 0" in proved(tmp_path / "run")


@pytest.mark.parametrize("what", ["another start", "no start", "swapped starts"])
def test_record_of_other_starts_is_not_proved(tmp_path: Path, what: str) -> None:
    """A record of a copy that has gone on by itself has the same rows and digests, and says nothing of this run."""
    run = tmp_path / "run"
    identity, records = chained(run)
    segments = [line for line in records if line["kind"] == "segment"]
    if what == "swapped starts":
        segments[0]["link"], segments[-1]["link"] = segments[-1]["link"], segments[0]["link"]
    else:
        segments[-1]["link"] = (
            identity.begin(3, None).author.link if what == "another start" else None
        )
    with pytest.raises(
        RunError, match=rf"is not one of the run's {len(identity.starts)} starts"
    ):
        proved(write(run, records))


def test_record_whose_beginning_was_lost_is_not_proved(tmp_path: Path) -> None:
    """A file that was removed between two starts: what the first has read would be told as not read yet."""
    _, records = chained(tmp_path / "run")
    starts = [at for at, line in enumerate(records) if line["kind"] == "segment"]
    first = records[starts[1]]["first_step"]
    with pytest.raises(RunError, match=rf"^steps 1 to {first - 1} have no record"):
        proved(write(tmp_path / "run", records[starts[1] :]))


def test_record_of_a_run_without_run_json_is_not_proved(tmp_path: Path) -> None:
    chained(tmp_path / "run")
    (tmp_path / "run/run.json").unlink()
    with pytest.raises(
        ThreefoldError, match=r"has a run's files, but no run.json that names the run"
    ):
        proved(tmp_path / "run")
