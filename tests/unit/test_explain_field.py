"""`threefold explain` on logs of the field: half of them were not looked at while its rules were written."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from logs import field
from threefold.explain.known import known_errors
from threefold.explain.sources.signs import anchor

# What the judged half reached; see tests/logs/README.md for how it is kept apart, and how often it was run.
RIGHT_AT_LEAST = 0.95
WRONG_AT_MOST = 0.01

RETRY_RIGHT_AT_LEAST = 0.95
LATE_RIGHT_AT_LEAST = 0.8
LATE_WRONG_AT_MOST = 0.01
LATE_FALSE_ALARMS_AT_MOST = 0

WRITTEN = list(field.logs("write"))
LATE = list(field.logs("late"))


def share(found: Counter[str], verdict: str) -> float:
    return found[verdict] / sum(found[one] for one in ("right", "wrong", "unknown", "symptom"))


def test_judged_half_holds_what_it_reached() -> None:
    found = field.figures("judge")
    assert share(found, "right") >= RIGHT_AT_LEAST, found
    assert share(found, "wrong") <= WRONG_AT_MOST, found
    assert found["false alarm"] == 0, found


@pytest.mark.parametrize("half", ["write", "judge", "late"])
def test_launchers_are_told_whether_to_start_a_job_again(half: str) -> None:
    right = field.retries(half)
    assert right[True] / right.total() >= RETRY_RIGHT_AT_LEAST, right


@pytest.mark.skipif(not LATE, reason="every late set was opened")
def test_logs_filed_after_the_rules_hold_what_they_reached() -> None:
    found = field.figures("late")
    assert share(found, "right") >= LATE_RIGHT_AT_LEAST, found
    assert share(found, "wrong") <= LATE_WRONG_AT_MOST, found
    assert found["false alarm"] <= LATE_FALSE_ALARMS_AT_MOST, found


@pytest.mark.parametrize("log", WRITTEN, ids=lambda log: log.name)
def test_log_that_rules_are_written_from(log: field.FieldLog) -> None:
    if log.cause == "other":  # no page covers it: no cause is claimed
        assert field.judged(log)[0] in ("unknown", "symptom")
        return
    expected = ("unknown", None) if log.stays_unknown else ("right", log.cause)
    assert field.judged(log) == (expected if log.cause is not None else ("quiet", None))


def test_there_are_enough_logs() -> None:
    every = [*WRITTEN, *field.logs("judge")]
    failures = [log for log in every if log.cause is not None]
    assert len(failures) >= 150
    assert len(every) - len(failures) >= 60
    assert {log.cause for log in failures} <= known_errors().keys() | {"other"}


def test_log_says_where_it_is_from_and_names_nobody() -> None:
    for log in [*WRITTEN, *field.logs("judge"), *LATE]:
        assert re.match(r"https?://|here: ", log.source), log.name
        assert len(log.text) < 6000, log.name
        assert not re.search(
            r"/home/(?!ray|\.cache)\w|/Users/|\bhf_[A-Za-z0-9]{10}|[\w.]+@[\w-]+\.(?:com|org|net)\b",
            log.text,
        ), log.name


def test_no_log_is_judged_that_its_name_does_not_allow() -> None:
    assert all(log.may_be_judged for log in field.logs("judge"))
    names = [log.name for half in ("write", "judge", "late") for log in field.logs(half)]
    assert len(names) == len(set(names)) >= 1400


@pytest.mark.parametrize(
    ("sign", "literal"),
    [
        (r"CUDA out of memory", "CUDA out of memory"),
        (r"environment variable \w+ expected, but not set", " expected, but not set"),
        (r"Xid \(PCI:\S+\): (?:48|63)\b", "Xid (PCI:"),
        (r"[Ww]orld[_ ]size.{0,60}is not divisible by", "is not divisible by"),
        (r"one|another", ""),
    ],
)
def test_anchor_is_literal_text_that_every_line_with_the_sign_has(
    sign: str, literal: str
) -> None:
    assert anchor(sign) == literal


def test_signs_search_in_linear_time() -> None:
    for known in known_errors().values():
        for sign in known.signs:
            text = sign.pattern.pattern
            assert len(sign.anchor.encode()) >= 4
            assert not re.search(r"[*+]\)[*+]", text), text  # no repetition of a repetition
            assert text.count(".*") <= 3, text
