"""Rank 0 keeps the store where no launcher's agent does: what the others say when rank 0 fails and ends first."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from launchers.processes import free_port, rank
from ranks import warm
from ranks.runs import environment

pytestmark = pytest.mark.timing
NUM_RANKS = 3
PROGRAM = """
import threefold
from threefold.mesh import exchange

mesh = threefold.init_mesh(device="cpu")


def fails():
    raise threefold.errors.DataError("row 3 is torn", expected="rows", fix="other rows")


def late(wait_for_all=exchange._wait_for_all):
    # The others read why only when rank 0 would have ended.
    def waiting(store, keys):
        store.wait(keys)
        time.sleep(1.0)
        return wait_for_all(store, keys)

    if mesh.rank:
        import time
        exchange._wait_for_all = waiting


def leaves():
    if mesh.rank == 0:
        raise KeyError("mine")


"""
TORN = "threefold.errors.DataError: row 3 is torn\n  expected: rows\n  fix: other rows\n"
LOST = (
    "  expected: all ranks to run until the end; rank 0 keeps the store in which they meet\n"
    "  fix: see what the other ranks have printed, rank 0 first; "
)
CASES = {
    "what it makes for all": ("late()\nmesh.share('rows', fails)", TORN),
    "its part of what all conclude": (
        "late()\nmesh.decide_on('rows', fails if mesh.rank == 0 else list, list)",
        TORN,
    ),
    "before a value": ("leaves()\nmesh.share('rows', list)", LOST),
    "before a step": ("leaves()\nmesh.agree('step', 1)", LOST),
}


@pytest.mark.parametrize("case", CASES)
def test_the_others_say_why_or_name_rank_0(case: str, tmp_path: Path) -> None:
    lines, said = CASES[case]
    (tmp_path / "program.py").write_text(PROGRAM + lines)
    port = free_port()
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                warm.Running(
                    warm.script,
                    tmp_path,
                    (str(tmp_path / "program.py"),),
                    {**environment(tmp_path), **rank(number, NUM_RANKS, port)},
                )
            )
            for number in range(NUM_RANKS)
        ]
        for number, running in enumerate(ranks):
            assert running.wait(60) == 1
            if number:
                assert said in running.err(), running.err()
            assert "DistNetworkError" not in running.err().splitlines()[-1]
