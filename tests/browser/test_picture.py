"""The picture of the README: its script shows the parts of a page that it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from report_runs import eventful_run
from threefold.report.document import report
from threefold.report.facts import gather

pytestmark = pytest.mark.browser
SCRIPT = Path(__file__).parents[2] / "tools" / "picture.py"


def test_picture_of_a_page(browser: Any, tmp_path: Path) -> None:
    run = eventful_run(tmp_path / "run")
    (run / "report.html").write_bytes(report([gather(run)]))
    picture = tmp_path / "picture.png"
    subprocess.run(
        [sys.executable, SCRIPT, "--keep", tmp_path, "--to", picture], check=True, timeout=180
    )
    head = picture.read_bytes()[:24]
    width, height = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
    assert head.startswith(b"\x89PNG") and width == 1280 and 560 <= height < 1000, (
        "some parts of the page, and not all"
    )
