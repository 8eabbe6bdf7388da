"""The build id: the same for the same sources, another for any other, and in all that says which build it was."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import threefold
from threefold.build_id import build_id, source_digest

SOURCE = Path(threefold.__file__).parent


def test_one_changed_byte_is_another_build(tmp_path: Path) -> None:
    copy = tmp_path / "threefold"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(copy) == source_digest(SOURCE)
    assert build_id() == f"{threefold.__version__}+{source_digest(SOURCE)[:12]}"
    module = copy / "training" / "step.py"
    text = module.read_bytes()
    module.write_bytes(text.replace(b"max=1.0", b"max=1.1").replace(b"1 +", b"2 +", 1))
    changed = source_digest(copy)
    assert changed != source_digest(SOURCE)
    module.write_bytes(text)
    module.rename(module.with_name("steps.py"))
    assert source_digest(copy) not in (changed, source_digest(SOURCE))


def test_the_command_says_its_build() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "threefold", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert re.fullmatch(r"threefold \d+\.\d+\.\d+\+[0-9a-f]{12}\n", done.stdout)
    assert done.stdout == f"threefold {build_id()}\n"
