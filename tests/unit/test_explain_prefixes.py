"""What stands before every line of a log says who wrote it, and never what happened: the answer is the same without."""

from __future__ import annotations

import json

import pytest

from logs import field
from threefold.explain import answer, prefixes
from threefold.explain.evidence import JobEvidence
from threefold.explain.log import Log, LogSource

LOGS = [*field.logs("write"), *field.logs("judge"), *field.logs("late")]


def said(text: str) -> tuple[str, str | None, str | None]:
    found = answer.data(answer.answer(JobEvidence([LogSource("", text)])))
    return found["status"], found.get("name"), found.get("confidence")


@pytest.mark.parametrize("prefix", field.PREFIXES)
def test_a_log_says_the_same_behind_a_prefix(prefix: str) -> None:
    begin = list(field.PREFIXES).index(prefix)
    for log in LOGS[begin :: len(field.PREFIXES)]:
        assert said(field.behind(prefix, log.text)) == said(log.text), log.name


def test_the_rank_and_the_host_of_a_prefix_are_kept() -> None:
    wrapped = {
        "3: RuntimeError: no": (3, None),
        "[pod/job-7/main] RuntimeError: no": (None, "job-7"),
        "Feb 01 10:00:00 n4 job[812]: RuntimeError: no": (None, "n4"),
        "[default2]:RuntimeError: no": (2, None),
        json.dumps({"msg": "RuntimeError: no", "rank": 5}): (5, None),
        "[pod/job-7/main] 3: RuntimeError: no": (3, "job-7"),
        "18:11:06.680 [rank4]:RuntimeError: no": (4, None),
    }
    for text, origin in wrapped.items():
        line = Log.of(text).line(0)
        assert (line.text, line.rank, line.host) == ("RuntimeError: no", *origin), text


def test_a_message_of_several_lines_keeps_the_number_of_its_line() -> None:
    log = Log.of("\n".join(json.dumps({"message": f"first {n}\nsecond {n}"}) for n in range(3)))
    lines = [log.line(2), log.line(3)]
    assert [(line.number, line.text) for line in lines] == [(2, "first 1"), (2, "second 1")]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"{n}: part {n} of the list" for n in range(1, 9)),
        "\n".join(f"{name} | 12 | 4" for name in ("a", "b", "c", "d", "e", "f")),
        "\n".join(json.dumps({"loss": 0.1 * n, "step": n}) for n in range(6)),
        "step 1\nstep 2\n3: step 3\nstep 4",
        "",
        "[" * 200_000,
        '{"log": ' * 20_000,
    ],
    ids=[
        "a list",
        "a table",
        "metrics",
        "one line of many",
        "nothing",
        "brackets",
        "nested JSON",
    ],
)
def test_what_only_looks_like_a_prefix_stays(text: str) -> None:
    lines = text.split("\n")
    assert [line.text for line in prefixes.taken_off(lines)] == lines
