"""A rank stays on the cores of its device's NUMA node, unless its launcher has bound it already."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from threefold.run.process import stay_near

_TWO = {"node0": "0-3,8-11", "node1": "4-7,12-15"}
_ALL = set(range(16))


def _stayed(
    monkeypatch: pytest.MonkeyPatch,
    system: Path,
    own: set[int],
    *,
    nodes: dict[str, str],
    at: str | None,
) -> dict[int, set[int]]:
    """The cores of each thread of a process that could use `own`, but for one thread that was bound to core 0.

    Args:
        nodes: the cores of each, as the kernel lists them.
        at: the node of the device, as the kernel says it; None: it says nothing.
    """
    threads = list(map(int, os.listdir("/proc/self/task")))
    bound = {0: own, **dict.fromkeys(threads, own), -1: {0}}
    for name, listed in nodes.items():
        (system / "devices/system/node" / name).mkdir(parents=True)
        (system / "devices/system/node" / name / "cpulist").write_text(f"{listed}\n")
    if at is not None:
        device = system / "bus/pci/devices/0000:9b:0a.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{at}\n")
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    # The last thread ends before it is looked at.
    monkeypatch.setattr(os, "listdir", lambda folder: [*map(str, threads), "-1", "999999"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: _known(bound, thread))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    stay_near(torch.device("cuda", 3), system)
    assert bound.pop(-1) == {0} and bound.pop(0) == own
    return bound


def _known(bound: dict[int, set[int]], thread: int) -> set[int]:
    if thread not in bound:
        raise ProcessLookupError(3, "No such process")
    return bound[thread]


@pytest.mark.parametrize(
    ("at", "cores"), [("0", {0, 1, 2, 3, 8, 9, 10, 11}), ("1", {4, 5, 6, 7, 12, 13, 14, 15})]
)
def test_every_thread_is_bound_to_the_node_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    at: str,
    cores: set[int],
) -> None:
    caplog.set_level(logging.INFO, "threefold")
    bound = _stayed(monkeypatch, tmp_path, _ALL, nodes=_TWO, at=at)
    assert len(bound) and all(each == cores for each in bound.values())
    listed = _TWO[f"node{at}"]
    assert caplog.messages == [
        f"bound to the cores of NUMA node {at}, where cuda:3 is: {listed}"
    ]


@pytest.mark.parametrize(
    ("own", "nodes", "at"),
    [
        pytest.param(_ALL, _TWO, "-1", id="the kernel does not know the node"),
        pytest.param(_ALL, _TWO, None, id="the kernel does not show the device"),
        pytest.param(_ALL, {"node0": "0-15"}, "0", id="one node"),
        pytest.param(
            _ALL, {"node0": "0-15", "node1": ""}, "0", id="another node without cores"
        ),
        pytest.param(_ALL, {"node0": "0-15", "node1": ""}, "1", id="a node without cores"),
        pytest.param({4, 5}, _TWO, "0", id="bound to some cores"),
        pytest.param({0, 1, 2, 3, 8, 9, 10, 11}, _TWO, "0", id="bound to a node"),
        pytest.param({0, 1, 2, 3, 8, 9, 10, 11}, _TWO, "1", id="bound to the other node"),
        pytest.param(_ALL - {5}, _TWO, "1", id="bound to a part of it"),
    ],
)
def test_nothing_is_bound_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    own: set[int],
    nodes: dict[str, str],
    at: str | None,
) -> None:
    caplog.set_level(logging.INFO, "threefold")
    bound = _stayed(monkeypatch, tmp_path, own, nodes=nodes, at=at)
    assert all(each == own for each in bound.values()) and caplog.messages == []
