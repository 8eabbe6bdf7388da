"""Every request that these tests see refused is judged by its fix: it can be pasted, and ends what was wrong."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from threefold.config import loading
from threefold.errors import ConfigError

# What only a user knows stands in capitals.
_OPEN = re.compile(r"\b[A-Z][A-Z_]{3,}\b|\.\.\.")


def _options(fix: str) -> list[tuple[str, str]]:
    """The options of `--key value --key value   (a remark)`; [] of another kind of fix, or of an open one."""
    command = re.split(r" {3}\(", fix)[0]
    if not command.startswith("--") or _OPEN.search(command):
        return []
    words = shlex.split(command)
    assert all(word.startswith("--") for word in words[::2]) and len(words) % 2 == 0, (
        f"it cannot be pasted: {fix}"
    )
    return [
        (word.removeprefix("--"), value)
        for word, value in zip(words[::2], words[1::2], strict=True)
    ]


@pytest.fixture(autouse=True)
def _fixes_end_what_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading.load

    def judged(path: Any = None, overrides: Sequence[tuple[str, str]] = (), **keys: Any) -> Any:
        try:
            return load(path, overrides, **keys)
        except ConfigError as error:
            for problem in error.problems:
                if not (fix := _options(problem.fix)):
                    continue
                named = {key for key, _ in fix}
                others = [(key, value) for key, value in overrides if key not in named]
                try:
                    load(path, [*others, *fix], **keys)
                except ConfigError as again:
                    left = [each.what for each in again.problems]
                    assert problem.what not in left, (
                        f"the fix does not end it: {problem.what}: {problem.fix}"
                    )
                    unknown = [what for what in left if what.startswith("unknown")]
                    assert not unknown, f"the fix is not known: {problem.fix}: {unknown}"
            raise

    monkeypatch.setattr(loading, "load", judged)
