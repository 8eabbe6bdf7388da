"""Two tests may run at a time (pytest -n 2): each worker with one thread, and the longest files first."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import typer.main
import typer.testing
from hypothesis import settings

from journal import Journal
from long_tests import mark_long

# Read by torch when it is imported: ranks and workers are as many as there are cores, or more.
os.environ["OMP_NUM_THREADS"] = "1"

# A machine that does something else beside the tests is slow, not wrong.
# In CI the same cases each time: what is new is found by whoever runs the tests, not by who merges.
settings.register_profile(
    "threefold", deadline=None, derandomize="THREEFOLD_CI_TOKEN" in os.environ
)
settings.load_profile("threefold")

# What an app's command is built from stays the same: a tenth of a second of each test that calls it.
_command = functools.cache(lambda app, *_: typer.main.get_command(app))
typer.testing._get_command = lambda app: _command(
    app, len(app.registered_commands), len(app.registered_groups)
)

# Files of whole runs begin, so that none of them is left alone at the end; the order of a file's tests stays.
FIRST = ("ranks", "errors", "gpu", "examples", "launchers", "unit")


def pytest_configure(config: pytest.Config) -> None:
    """Caches and temporary files of the tests' own, which all processes of a worker share."""
    # A shell starts what it puts in the background with Ctrl-C ignored, and so would what the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest keeps the folders of its last runs, and torch what it compiled. All else goes at the end, with what the
    # processes that tests kill have left.
    temporary = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", temporary)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{temporary}/torchinductor_{os.getuid()}")
    folder = tempfile.mkdtemp(prefix="threefold-tests-")
    os.environ["XDG_CACHE_HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing's own folder (-100), which lies in it. A worker's lies in that of pytest's main process.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    # Taken out of the environment: neither workers nor what tests start has a journal of its own.
    if results := os.environ.pop("THREEFOLD_CI_JOURNAL", None):
        journal = Journal(Path(results))
        config.pluginmanager.register(journal, "threefold-journal")
        config.add_cleanup(journal.close)


def pytest_sessionstart(session: pytest.Session) -> None:
    # A worker asks pytest-rerunfailures' server in two packets a test: without this, the second waits 40 ms.
    if connection := getattr(getattr(session.config, "failures_db", None), "sock", None):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long(items, all_there=not any("::" in argument for argument in config.args))
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("timing"):
                # One that has used up its time limit hangs: it is not asked again.
                item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=["Timeout"]))
            else:
                item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=["^Overdue"]))
    items.sort(
        key=lambda item: (
            FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST)
        )
    )


def pytest_collection_finish() -> None:
    """Ten thousand tests and all that they import stay to the end: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_a_file_leaves_is_frozen() -> Iterator[None]:
    """Modules imported late, and caches: a Trainer, which collects garbage at each start, took seconds for them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_mesh_is_left() -> Iterator[None]:
    """A test closes the mesh that it made: samplers of the tests after it would take their place from it."""
    yield
    module = sys.modules.get("threefold.mesh.mesh")
    mesh = module.active_mesh() if module else None
    if mesh is not None:
        mesh.close()
        pytest.fail("this test leaves a mesh open: call mesh.close()")
