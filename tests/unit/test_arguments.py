"""The config's part of a command line: one optional file, and exactly one value for each key."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.commands.arguments import split
from threefold.errors import ConfigError

KEYS = st.from_regex(r"[a-z_]+\.[a-z_]+", fullmatch=True)
VALUES = st.text(max_size=20)


@pytest.mark.parametrize(
    ("arguments", "path", "pairs"),
    [
        ([], None, []),
        (["c.yaml"], "c.yaml", []),
        (["--train.steps", "5"], None, [("train.steps", "5")]),
        (["--train.steps=5"], None, [("train.steps", "5")]),
        (["--train.steps", "5", "c.yaml"], "c.yaml", [("train.steps", "5")]),
        (["--a.b", "1", "c.yaml", "--a.b", "2"], "c.yaml", [("a.b", "1"), ("a.b", "2")]),
        (["--log.dir=a=b"], None, [("log.dir", "a=b")]),
        (["--log.dir", "a=b"], None, [("log.dir", "a=b")]),
        (["--log.dir="], None, [("log.dir", "")]),
        (["--log.dir", ""], None, [("log.dir", "")]),
        (["--log.dir=--x"], None, [("log.dir", "--x")]),
        (["--optimizer.lr", "-1"], None, [("optimizer.lr", "-1")]),
        (["--optimizer.betas", "[0.9, 0.95]"], None, [("optimizer.betas", "[0.9, 0.95]")]),
        (["-"], "-", []),
    ],
)
def test_file_and_pairs(
    arguments: list[str], path: str | None, pairs: list[tuple[str, str]]
) -> None:
    assert split(arguments) == (path, pairs)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(KEYS, VALUES, st.booleans())), place=st.integers(0, 9))
def test_both_spellings_keep_every_value_and_its_order(
    pairs: list[tuple[str, str, bool]], place: int
) -> None:
    """`--key value` and `--key=value` say the same, wherever the file stands between them."""
    groups = [
        [f"--{key}", value] if apart and not value.startswith("--") else [f"--{key}={value}"]
        for key, value, apart in pairs
    ]
    groups.insert(min(place, len(groups)), ["c.yaml"])
    assert split([part for group in groups for part in group]) == (
        "c.yaml",
        [(key, value) for key, value, _ in pairs],
    )


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--train.steps"], ["--train.steps has no value"]),
        (["--train.steps", "--log.dir", "x"], ["--train.steps has no value"]),
        (["-v"], ["unknown option -v"]),
        (["a.yaml", "b.yaml"], ["a second config file: b.yaml"]),
        (["--optimizer.betas", "[0.9,", "0.95]", "x"], ["a second config file: x"]),
        (
            ["a", "-v", "b", "--c"],
            ["unknown option -v", "a second config file: b", "--c has no value"],
        ),
    ],
)
def test_everything_wrong_is_said_at_once(arguments: list[str], wrong: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        split(arguments)
    assert [problem.what for problem in caught.value.problems] == wrong
