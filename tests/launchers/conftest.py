"""One Slurm cluster, one moto server and one short run to compare with, for all tests of a session."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers import sagemaker, slurm
from launchers.launches import two
from ranks.faults import wait_for
from ranks.runs import command, curve, prepare


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def launch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where launchers start runs; its cache holds the prepared data after the first run."""
    folder = tmp_path_factory.mktemp("launchers")
    prepare(folder)
    return folder


@pytest.fixture(scope="session")
def losses_of_two(launch_folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of the run of `two` that the command launches itself."""
    done = command(launch_folder, *two(launch_folder / "self").arguments()[2:])
    assert done.returncode == 0, done.stderr
    return curve(launch_folder / "self")


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a moto server on this machine, on a port that it chose."""
    code = (
        "import sys; from moto.server import ThreadedMotoServer; server = ThreadedMotoServer('127.0.0.1', 0);"
        "server.start(); print('http://%s:%d' % server.get_host_and_port(), file=sys.stderr, flush=True);"
        "sys.stdin.read(); server.stop()"
    )
    output = tmp_path_factory.mktemp("moto") / "moto.txt"
    process = subprocess.Popen(
        [str(sagemaker.PYTHON), "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=output.open("wb"),
    )
    assert process.stdin is not None
    try:
        lines = wait_for(
            lambda: re.findall(r"^(http://\S+)\n", output.read_text(), re.MULTILINE),
            "moto's address",
        )
        yield lines[0]
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
