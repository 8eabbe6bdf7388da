"""A second Ctrl-C leaves at once, though the main thread waits in code that runs no handler of Python's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

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
        store.wait(["what nobody sets"], timedelta(seconds=6))
    except dist.DistError:
        pass
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [((), 130), (("saving",), 0)], ids=["in a step", "while it saves"]
)
def test_a_second_ctrl_c_is_heard_beside_a_main_thread_that_waits(
    arguments: tuple[str, ...], code: int
) -> None:
    command = [sys.executable, "-c", WAITS, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(_ONE_REQUEST_S + 0.3)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == code
        assert code != 130 or time.monotonic() - begun < 3
