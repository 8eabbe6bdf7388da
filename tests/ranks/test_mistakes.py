"""docs/mistakes.md prints what it says: each of its mistakes is made, on the ranks that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

import mistakes

pytestmark = pytest.mark.ranks


def test_the_page_says_what_is_printed(tmp_path: Path) -> None:
    found = mistakes.sections()
    assert len(found) >= 40 and len({each.title for each in found}) == len(found)
    # `PYTHONPATH=tests python tests/mistakes.py` writes the page.
    for section, now in zip(found, mistakes.printed(found, tmp_path), strict=True):
        assert now == section.printed, section.title
        assert "\n  expected: " in now and "\n  fix: " in now, section.title
