"""Reading a launcher's variables: all of them, none of them, or an error that says which."""

from __future__ import annotations

import os

import pytest

from threefold.errors import ConfigError
from threefold.mesh.launch import LaunchInfo, read

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


def refused(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(environ)
    (problem,) = caught.value.problems
    return problem.what


def test_without_a_launcher_it_is_one_rank_of_one() -> None:
    for environ in ({}, {"PATH": "/bin", "LOCAL_RANK": "3", "MASTER_ADDR": "host", "TORCHELASTIC_RUN_ID": "x"}):
        info = read(environ)
        assert info == LaunchInfo()
        assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (0, 1, 0, 1)
        assert info.launcher is None


def test_torchrun() -> None:
    assert read(TORCHRUN) == LaunchInfo(
        rank=5, world_size=8, local_rank=1, local_world_size=4, launcher="torchrun", restart=2
    )


def test_the_four_variables_of_torch_are_enough() -> None:
    """Without local ones all ranks are taken to be on this machine."""
    assert read(PLAIN) == LaunchInfo(rank=3, world_size=4, local_rank=3, local_world_size=4, launcher="environment")


@pytest.mark.parametrize("rank", range(8))
def test_local_rank_follows_from_the_ranks_of_a_machine(rank: int) -> None:
    environ = {**PLAIN, "RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read(environ).local_rank == rank % 4


def test_local_rank_is_the_launchers_where_it_is_given() -> None:
    assert read({**TORCHRUN, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["RANK"], "WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        (["WORLD_SIZE"], "RANK and MASTER_ADDR and MASTER_PORT"),
        (["RANK", "WORLD_SIZE"], "MASTER_ADDR and MASTER_PORT"),
        (["RANK", "WORLD_SIZE", "MASTER_ADDR"], "MASTER_PORT"),
        (["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "RANK"),
    ],
)
def test_half_set_variables_are_refused(given: list[str], missing: str) -> None:
    present = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name in given)
    assert refused({name: TORCHRUN[name] for name in given}) == f"{present} set, but {missing} not"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["", "two", "-1", "1.0", " 1", "²", "\u0663"])
def test_value_that_is_no_number_is_refused(name: str, value: str) -> None:
    assert refused({**TORCHRUN, name: value}) == f"{name} = {value!r} is not a number"


@pytest.mark.parametrize(("rank", "world_size"), [(4, 4), (5, 4), (0, 0)])
def test_rank_outside_of_the_world_is_refused(rank: int, world_size: int) -> None:
    environ = {**PLAIN, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    assert refused(environ) == f"RANK = {rank} with WORLD_SIZE = {world_size}"


def test_only_the_given_mapping_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read({}) == LaunchInfo()
    assert read(os.environ).rank == 5


def test_start_is_told_from_those_before_where_the_store_is_the_launchers() -> None:
    shared = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert read(shared).generation == "start-2"
    assert read(shared).max_restarts == 3
    assert read({**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"}).generation is None
