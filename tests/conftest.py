"""Two tests may run at a time (pytest -n 2): each worker with one thread, and the longest files first."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Read by torch when it is imported: ranks and workers are as many as there are cores, or more.
os.environ["OMP_NUM_THREADS"] = "1"

# A machine that does something else beside the tests is slow, not wrong.
settings.register_profile("threefold", deadline=None)
settings.load_profile("threefold")

# Files of whole runs begin, so that none of them is left alone at the end; the order of a file's tests stays.
FIRST = ("ranks", "compat", "errors", "gpu", "examples", "launchers", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))
