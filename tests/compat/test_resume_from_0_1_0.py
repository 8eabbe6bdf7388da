"""A run, a store and a Trainer's checkpoint that version 0.1.0 left behind are resumed as that version would have.

`make.py` wrote them. 0.1.0 resumed them bit for bit; another CPU adds the same numbers in another order, and that much
the tolerance holds. A rate that is wrong by half a percent is ten times more.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compat import cases
from ranks.runs import command, curve
from ranks.spawn import run_ranks
from threefold.commands.data import audit_lines
from threefold.data.store.store import TokenStore
from threefold.data.text.listing import FILE

EXPECTED: dict[str, Any] = json.loads((cases.KEPT / "expected.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what was kept."""
    return Path(shutil.copytree(cases.KEPT, tmp_path / "kept"))


def assert_resumed(found: list[Any], name: str) -> None:
    wanted = EXPECTED[name]["curve"]
    assert len(found) == cases.STEPS
    for step, (values, kept) in enumerate(zip(found, wanted, strict=True), start=1):
        assert values == pytest.approx(kept, rel=1e-6 if step <= cases.STOPPED_AT else 1e-5), f"step {step}"


@pytest.mark.parametrize("name", list(cases.TRAINED))
def test_run_is_resumed_and_proved(name: str, folder: Path) -> None:
    before = command(folder, "data", "audit", name, "--contents")
    assert before.stdout == EXPECTED[name]["audit"], before.stderr
    done = command(folder, *cases.arguments(name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed(curve(folder / name), name)
    proved = command(folder, "data", "audit", name, "--contents")
    assert proved.returncode == 0, proved.stderr
    assert f"{name}: steps 1 to 8, 2 starts\n" in proved.stdout
    assert "proved: 64 reads, each by exactly one dp rank in exactly one step" in proved.stdout
    shown = command(folder, "data", "order", name, "--step", "3", "--show")
    assert shown.stdout == EXPECTED[name]["shown"], shown.stderr


@pytest.mark.parametrize(("name", "tail", "rest"), [("packed", "drop", "96 of 101"), ("tensor", "drop", None)])
def test_run_keeps_its_order(name: str, tail: str, rest: str | None, folder: Path) -> None:
    """Its epochs' ends, which it dropped, and its version; over the end of an epoch, and twice by the same command."""
    for steps in ("9", "16"):
        done = command(folder, *cases.arguments(name), "--train.steps", steps)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "changed: data.tail" not in done.stdout
    lines = [json.loads(line) for line in (folder / name / "audit.jsonl").read_text().splitlines()]
    starts = [line for line in lines if line["kind"] == "segment"]
    assert [(line["tail"], line["order_version"]) for line in starts] == [(tail, 1)] * 3
    proved = command(folder, "data", "audit", name, "--contents")
    assert proved.returncode == 0, proved.stderr
    if rest is not None:
        assert f"  tail: {tail}\n" in (folder / name / "config.yaml").read_text()
        assert f"  epoch 0: {rest} rows, each exactly once; 5 not: they do not fill a batch" in proved.stdout
        other = command(folder, "resume", name, "--train.steps", "20", "--data.tail", "carry")
        assert other.stderr.startswith("the saved state has tail = drop, but here tail = carry\n")


def test_folder_that_is_read_otherwise_now_is_refused_with_the_glob_that_goes_on(folder: Path) -> None:
    """Files that 0.1.0 left out in silence lie in the corpus; the fix, pasted, resumes the run."""
    (folder / "corpus" / "part-9.txt.gz").write_bytes(gzip.compress(b"left out by 0.1.0"))
    refused = command(folder, *cases.arguments("sharded"))
    assert refused.returncode == 2 and "the saved state has data = " in refused.stderr
    fix = re.search(r"fix: (--data\.source .*)   \(reads the folder as 0\.1\.0 did\), or resume with", refused.stderr)
    assert fix is not None, refused.stderr
    done = command(folder, *cases.arguments("sharded"), *shlex.split(fix[1]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed(curve(folder / "sharded"), "sharded")
    assert f"  files  4 files read (3.127 KiB); listed in sharded/{FILE}\n" in done.stdout


def test_store_opens_to_the_same_tokens_and_is_made_the_same(folder: Path) -> None:
    kept = TokenStore(folder / "store" / "tokens")
    texts = [path.read_bytes() for path in sorted((folder / "corpus").iterdir())]
    ends = [0, *kept.document_ends.tolist()]
    documents = [kept.tokens[first:end].tolist() for first, end in pairwise(ends)]
    assert documents == [[*text, 256] for text in texts]
    again = command(folder, *cases.PREPARE)
    assert again.stdout == EXPECTED["prepared"].replace(" is made: ", " is there already: "), again.stderr
    made = command(folder, *cases.PREPARE[:-1], "anew")
    assert made.returncode == 0, made.stderr
    new = TokenStore(folder / "anew" / "tokens")
    assert new.fingerprint == kept.fingerprint
    files = {path.name for path in (folder / "store").iterdir()}
    assert {path.name for path in (folder / "anew").iterdir()} == files | {"tokens.blocks"}
    assert (folder / "anew/tokens.bin").read_bytes() == (folder / "store/tokens.bin").read_bytes()


@pytest.mark.parametrize("name", list(cases.TRAINER))
def test_trainer_is_resumed_and_proved(name: str, folder: Path) -> None:
    num_ranks, sizes = cases.TRAINER[name]
    assert "\n".join(audit_lines(folder / name)) == EXPECTED[name]["audit"].removesuffix("\n").replace(
        f"{name}:", f"{folder / name}:"
    )
    for found in run_ranks(_resume, num_ranks, str(folder / name), sizes):
        assert_resumed(found, name)
    proved = "\n".join(audit_lines(folder / name))
    assert "steps 1 to 8, 2 starts" in proved
    assert "proved: 64 reads, each by exactly one dp rank in exactly one step" in proved


def _resume(folder: str, sizes: dict[str, int]) -> list[tuple[float, float]]:
    return cases.train_with_trainer(folder, sizes, resume=True)
