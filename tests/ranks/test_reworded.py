"""No program decides by words that are made for people: with other words everywhere all behaviour is the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ranks.runs import command, prepare
from reworded import reword
from threefold.commands import main
from threefold.explain import answer
from threefold.explain.evidence import gather as evidence_of
from threefold.report import sections
from threefold.report.facts import RunFacts, gather
from threefold.report.sections import verdict_of

pytestmark = pytest.mark.ranks
LOGS = Path(__file__).parents[1] / "logs"
STEPS = ("--train.steps", "6", "--checkpoint.every", "3", "--mesh.dp", "1")


def _reword_for_good() -> None:
    reword(pytest.MonkeyPatch())


def behaviour(folder: Path, first: Callable[[], None] | None = None) -> dict[str, Any]:
    """What programs decide, as plain values: of runs, a resume, a refusal, a page, why, explain, verify, the audit."""
    folder.mkdir(exist_ok=True)
    prepare(folder)
    told: dict[str, Any] = {}

    def run(name: str, *words: str) -> str:
        done = command(folder, *words, first=first)
        told[name] = done.returncode
        return done.stdout + done.stderr

    run("a run", "train", "config.yaml", *STEPS, "--log.dir", "a")
    run("another", "train", "config.yaml", *STEPS, "--log.dir", "b")
    rewind = ("--checkpoint.resume", "b/checkpoints/step-00000003")
    run("a rewind", "train", "config.yaml", *STEPS, "--log.dir", "b", *rewind)
    refused = run("a refusal", "train", "config.yaml", "--mesh.cp", "3", "--mesh.dp", "1")
    (folder / "refused.log").write_text(refused)
    for name in "ab":
        told[f"page of {name}"] = _page(gather(folder / name))
        told[f"proof of {name}"] = verdict_of(folder / name).proved
    kinds = [
        finding["kind"] for finding in _json("why", str(folder / "b"), "--json")["findings"]
    ]
    # Which steps took long is up to the machine.
    told["why"] = [kind for kind in kinds if kind != "slow"]
    told["against"] = _exit("verify", "--against", str(folder / "a"), str(folder / "b"))
    told["explained"] = {
        name: _explained(path)
        for name, path in (
            ("refusal", folder / "refused.log"),
            ("dumps", LOGS / "dumps" / "different"),
            ("run", folder / "b"),
        )
    }
    record = folder / "a" / "audit.jsonl"
    record.write_text(
        re.sub(r'"samples": \["\w{16}', f'"samples": ["{"0" * 16}', record.read_text(), count=1)
    )
    told["damaged proof"] = (
        verdict_of(folder / "a").proved,
        _exit("data", "audit", str(folder / "a")),
    )
    return told


def _page(facts: RunFacts) -> dict[str, Any]:
    head = facts.head
    assert head is not None
    return {
        "state": facts.state,
        "steps": (facts.num_steps, facts.metrics.steps, facts.metrics.first_steps),
        "events": [event["event"] for event in facts.events],
        "model": head.model,
        "mesh": facts.mesh,
        "choices": [name for name, _ in head.choices],
        "saved": [(saved.step, saved.state) for saved in facts.saved],
        "damaged": facts.num_damaged,
        "warnings": len(facts.warnings),
        "commands": [line.split()[1] for line, _ in facts.commands()],
    }


def _explained(path: Path) -> Any:
    found = answer.data(answer.answer(evidence_of([path])))
    line = found.get("line") or {}
    facts = len(found.get("facts", ()))
    return (
        found["status"],
        found.get("name"),
        found.get("confidence"),
        line.get("number"),
        line.get("rank"),
        facts,
    )


def _json(*words: str) -> Any:
    return json.loads(CliRunner().invoke(main.app, [*words]).stdout)


def _exit(*words: str) -> Any:
    done = CliRunner().invoke(main.app, [*words])
    return getattr(done.exception, "exit_code", done.exit_code)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    main._load(["why", "verify", "data"])
    return behaviour(tmp_path_factory.mktemp("plain"))


def test_other_words_change_no_behaviour(tmp_path: Path, plain: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        reword(patch)
        assert behaviour(tmp_path, _reword_for_good) == plain
    log = (tmp_path / "a" / "logs" / "rank-0000.log").read_text()
    # The words were others indeed.
    assert re.search(r"\bparameters\b", log) is None and "parameters" in log
    assert plain["proof of a"] and not plain["damaged proof"][0] and plain["a refusal"] == 2
    assert plain["explained"]["refusal"][1] == "threefold" and plain["page of b"]["steps"][
        2
    ] == [1, 4]


def _last_step_by_words(self: RunFacts) -> int | None:
    """As it was read once: out of the head that the run has printed."""
    found = re.findall(
        r"steps  \d+ to (\d+),", (self.path / "logs" / "rank-0000.log").read_text()
    )
    return int(found[-1]) if found else None


def _is_proved_by_words(run: Path) -> Any:
    found = sections.verdict_of(run)
    return found._replace(proved=found.proved or "samples" not in found.said)


@pytest.mark.parametrize(
    "plant",
    [
        partial(
            pytest.MonkeyPatch.setattr,
            target=RunFacts,
            name="num_steps",
            value=property(_last_step_by_words),
        ),
        partial(
            pytest.MonkeyPatch.setattr,
            target=__name__ + ".verdict_of",
            name=_is_proved_by_words,
        ),
    ],
    ids=["a number in a sentence", "a word of an error"],
)
def test_a_decision_by_words_is_seen(
    tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    before = behaviour(tmp_path / "plain")
    reword(monkeypatch)
    assert behaviour(tmp_path / "reworded", _reword_for_good) != before
