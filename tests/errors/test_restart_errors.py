"""The texts about restarts that nobody could make."""

from __future__ import annotations

import pytest

from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.mesh.environment import LaunchInfo
from threefold.mesh.exchange import lost_peer
from threefold.run.start import _refuse_unrestartable


def test_restarts_asked_of_a_rank_that_a_launcher_started() -> None:
    with pytest.raises(ConfigError) as caught:
        _refuse_unrestartable(Config(), LaunchInfo(launcher="torchrun"), 3)
    assert str(caught.value) == (
        "--max-restarts 3, but a launcher started this rank\n"
        "  expected: the launcher to restart the ranks that it started\n"
        "  fix: torchrun --max-restarts 3 ... -m threefold train ..., and no --max-restarts after train"
    )


def test_restarts_without_a_folder_to_find_again() -> None:
    with pytest.raises(ConfigError) as caught:
        _refuse_unrestartable(Config(), LaunchInfo(launcher="torchrun", max_restarts=2), 0)
    assert str(caught.value) == (
        "torchrun --max-restarts 2 without log.dir\n"
        "  expected: a folder that restarted ranks can find; otherwise they would begin another run\n"
        "  fix: --log.dir FOLDER"
    )
    _refuse_unrestartable(
        Config.model_validate({"log": {"dir": "a"}}), LaunchInfo(max_restarts=2), 0
    )


def test_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert str(lost_peer(RuntimeError("Connection closed by peer\nand where"))) == (
        "rank 0 lost its connection to another rank: Connection closed by peer\n"
        "  expected: all ranks to run until the end; rank 0 keeps the store in which they meet\n"
        "  fix: see what the other ranks have printed, rank 0 first; if none has reported an error, one was killed: "
        "look for `Out of memory` in the kernel's log (dmesg) of its host; the same command resumes from the newest "
        "checkpoint, and `threefold train --max-restarts N` does so automatically"
    )
    assert lost_peer(RuntimeError("shapes differ")) is None
