"""A Ctrl-C ends a command also while it imports a library that swallows it, and a second one ends a run at once, though
the main thread waits in code that runs no handler of Python's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import runs, warm
from threefold.training.stop_request import _ONE_REQUEST_S

WAITS = """
import sys
from datetime import timedelta

import torch.distributed as dist

from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.training.stop_request import StopRequest
import torch

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with StopRequest(Mesh(Topology(), 0, torch.device("cpu"))) as stop:
    stop.saving = "saving" in sys.argv
    print("ready", flush=True)
    try:
        store.wait(["what nobody sets"], timedelta(seconds=4 if stop.saving else 6))
    except dist.DistError:
        pass
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [((), 130), (("saving",), 0)], ids=["in a step", "while it saves"]
)
def test_a_second_ctrl_c_is_heard_beside_a_main_thread_that_waits(
    arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    (path := tmp_path / "waits.py").write_text(WAITS)
    environ = runs.environment(tmp_path)
    with warm.Running(warm.script, tmp_path, (str(path), *arguments), environ) as running:
        running.wait_for(lambda: "ready\n" in running.out(), "it waits", 60)
        os.kill(running.process, signal.SIGINT)
        time.sleep(_ONE_REQUEST_S + 0.3)
        begun = time.monotonic()
        os.kill(running.process, signal.SIGINT)
        assert running.wait(20) == code, running.err()
        assert code != 130 or time.monotonic() - begun < 3


SWALLOWS = """
import time

print("imported", flush=True)
try:
    time.sleep(20)
except BaseException:
    raise ImportError("not there")
"""


def test_ctrl_c_is_heard_by_a_command_that_imports_what_swallows_it(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(SWALLOWS)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-m", "threefold", "verify"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True) as command:
        assert command.stdout is not None and command.stderr is not None
        assert command.stdout.readline() == "imported\n"
        command.send_signal(signal.SIGINT)
        assert (command.wait(10), command.stderr.read()) == (130, "")
