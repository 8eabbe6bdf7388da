"""The places that `who.py` has written, compared with those that the ranks of a launcher must have."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from launchers.launches import Launch, Program, Start


def places(folder: Path, start: Start, num_ranks: int) -> list[dict[str, Any]]:
    """Starts `who.py` on each rank; returns what was written, by rank.

    Raises:
        AssertionError: it ended with an error, or not once for each rank.
    """
    output = folder / "places"
    output.mkdir()
    code, printed = start(folder, Program(output), num_ranks)
    assert code == 0, printed
    written = [json.loads(path.read_text()) for path in output.iterdir()]
    assert sorted(place["info"]["rank"] for place in written) == list(range(num_ranks)), printed
    return sorted(written, key=lambda place: place["info"]["rank"])


def check_places(written: list[dict[str, Any]], launch: Launch) -> None:
    """Every rank knows its own place, and all know one address of rank 0."""
    infos = [place["info"] for place in written]
    per_host = len(infos) // launch.hosts
    hosts = [info["host"] for info in infos[::per_host]]
    assert len(set(hosts)) == launch.hosts, hosts
    if launch.hosts == 1:
        assert hosts == [socket.gethostname()]
    for rank, info in enumerate(infos):
        numbers = (info["world_size"], info["local_rank"], info["local_world_size"])
        assert numbers == (len(infos), rank % per_host, per_host)
        assert info["launcher"] == launch.launcher
        assert info["host"] == hosts[rank // per_host]
        assert (info["restart"], info["own_device"]) == (0, False)
    addresses = {(info["master_addr"], info["master_port"]) for info in infos}
    assert len(addresses) == 1, addresses
    ((host, port),) = addresses
    assert port is not None and 0 < port < 2**16
    if launch.hosts == 1:
        assert socket.gethostbyname(host) in (
            "127.0.0.1",
            socket.gethostbyname(socket.gethostname()),
        )
    else:
        # By its name, or by its address on the hosts' network (ranks.two_hosts).
        assert host in (hosts[0], f"10.78.0.{10 + int(hosts[0].rpartition('-')[2])}")
    mesh = {"mesh.dp": "2", "mesh.cp": "1", "mesh.tp": "2"} if launch.own_mesh else {}
    defaults = written[0]["defaults"]
    assert {
        key: value
        for key, value in defaults.items()
        if key.startswith("mesh.") and value != "1"
    } == {key: value for key, value in mesh.items() if value != "1"}
