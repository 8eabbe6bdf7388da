"""The bound on local ranks: the default mesh runs anywhere, and more than a machine holds needs --force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from threefold.config.loading import LoadedConfig, validate
from threefold.errors import ConfigError, DataError
from threefold.mesh import local_ranks
from threefold.mesh.topology import Topology, default_topology
from threefold.run import start
from threefold.run.local_rank_limit import ALWAYS, BYTES_PER_RANK, Room, room_here


@pytest.mark.parametrize(
    ("num_cores", "free_bytes", "num_ranks"),
    [
        (1, 0, 8),  # the default, whatever the machine
        (2, 24 << 30, 16),
        (64, 24 << 30, 192),
        (64, 100 * BYTES_PER_RANK, 100),
        (64, None, 512),
    ],
)
def test_bound(num_cores: int, free_bytes: int | None, num_ranks: int) -> None:
    assert Room(num_cores, free_bytes).num_ranks == num_ranks


def test_default_mesh_always_has_room() -> None:
    assert default_topology(8).world_size <= ALWAYS <= room_here().num_ranks


def test_this_machine_is_seen() -> None:
    here = room_here()
    assert here.num_cores >= 1 and (here.free_bytes is None or 0 < here.free_bytes < 1 << 50)
    assert str(Room(2, 3 << 30)) == "2 cores and 3 GiB of free memory"
    assert str(Room(1, None)) == "1 core"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What `train_command` has started: the numbers of ranks, and 0 for their server."""
    for name in ("RANK", "WORLD_SIZE", "DP_SIZE", "CP_SIZE", "TP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    seen: list[int] = []

    def start_ranks(entry: Any, args: Any, *, num_ranks: int, **options: Any) -> int:
        seen.append(num_ranks)
        return 0

    monkeypatch.setattr(local_ranks, "preload", lambda modules: seen.append(0))
    monkeypatch.setattr(local_ranks, "start_ranks", start_ranks)
    monkeypatch.setattr(start, "room_here", lambda: Room(2, 24 << 30))
    return seen


def train(*, force: bool = False, **sections: Any) -> int:
    return start.train_command(
        LoadedConfig(validate({**sections, "mesh": {"device": "cpu", **sections["mesh"]}})),
        force=force,
    )


def refused(**sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        train(**sections)
    return str(caught.value).splitlines()


def test_more_ranks_than_room(started: list[int]) -> None:
    assert refused(mesh={"dp": 64}, train={"global_batch": 64}) == [
        "mesh.dp x mesh.cp x mesh.tp = 64, but this machine has room for 16 ranks: 2 cores and 24 GiB of free memory",
        "  expected: at most 8 ranks for each core, and 128 MiB of memory for each rank besides its part of the model",
        "  fix: smaller sizes, as --mesh.dp 2 --mesh.cp 2 --mesh.tp 2, or torchrun on several machines   "
        "(--force starts them here)",
    ]
    assert max(started) == 0
    train(mesh={"dp": 64}, train={"global_batch": 64}, force=True)
    train(mesh={})
    assert [count for count in started if count] == [64, 8]


@pytest.mark.parametrize("key", ["data", "eval"])
def test_source_that_is_not_there_starts_no_rank(
    started: list[int], tmp_path: Path, key: str
) -> None:
    with pytest.raises(
        DataError, match=rf"^{key}\.source = '{tmp_path}/gone' does not exist\n"
    ):
        train(mesh={"dp": 2}, **{key: {"source": f"{tmp_path}/gone"}})
    assert not any(started)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        (
            {"mesh": {"dp": 3}},
            "train.global_batch = 16 cannot be divided equally among 3 dp ranks",
        ),
        (
            {"mesh": {"dp": 2}, "train": {"micro_batch": 3}},
            "train.micro_batch = 3 does not divide the 8 rows of a dp rank",
        ),
        ({"mesh": {"cp": 3}}, "data.seq_len = 256 cannot be split over 3 cp ranks"),
        ({"mesh": {"tp": 3}}, "mesh.tp = 3 cannot divide the 8 attention heads of 'llama'"),
        (
            {
                "mesh": {"tp": 4},
                "model": {"config": {"model_type": "qwen3", "num_attention_heads": 6}},
            },
            "mesh.tp = 4 cannot divide the 6 attention heads of 'qwen3'",
        ),
        (
            {
                "mesh": {"tp": 2},
                "model": {
                    "config": {
                        "model_type": "llama",
                        "num_attention_heads": 4,
                        "num_key_value_heads": 32,
                    }
                },
            },
            "num_key_value_heads = 32 does not divide the 4 attention heads of 'llama'",
        ),
    ],
)
def test_impossible_mesh_starts_nothing(
    started: list[int], sections: dict[str, Any], what: str
) -> None:
    """Not even the server that imports for the ranks."""
    assert refused(**sections)[0] == what
    assert started == []


def test_heads_of_a_folder(started: list[int], tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "x", "text_config": {"num_attention_heads": 6}}'
    )
    model = {"name_or_path": str(tmp_path)}
    assert (
        refused(mesh={"tp": 4}, model=model)[0]
        == "mesh.tp = 4 cannot divide the 6 attention heads of 'x'"
    )
    (tmp_path / "config.json").write_text("[]")
    train(mesh={"tp": 4}, model=model)  # the ranks say what is wrong with it
    assert started == [0, 4]


def test_default_mesh_that_cannot_be_used_starts_no_ranks(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their server is: it imports while this process looks at the model."""

    def run_rank(loaded: LoadedConfig, topology: Topology, why: str) -> int:
        started.append(topology.world_size)
        return 0

    monkeypatch.setattr(start, "_run_rank", run_rank)
    train(mesh={}, train={"global_batch": 3})
    assert started == [0, 1]
    # What one process cannot do either is refused.
    assert refused(mesh={}, train={"micro_batch": 3})[0].startswith(
        "train.micro_batch = 3 does"
    )
    assert started == [0, 1, 0]


def test_force_is_not_for_launchers(
    monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert refused(mesh={}, force=True) == [
        "--force, but a launcher started this rank",
        "  expected: an option for ranks that are started here",
        "  fix: leave --force out",
    ]


def test_workers_need_room_as_ranks_do(started: list[int]) -> None:
    """Processes that only take turns: nobody asks for them but by a typing error."""
    with pytest.raises(ConfigError) as refused:
        train(mesh={"dp": 2, "cp": 1, "tp": 2, "device": "cpu"}, data={"num_workers": 8})
    assert str(refused.value) == (
        "data.num_workers = 8 x 4 ranks are 32 processes, but this machine has room for 16: "
        "2 cores and 24 GiB of free memory\n"
        "  expected: workers that have a core and memory of their own: more only take those of the ranks\n"
        "  fix: --data.num_workers 4   (--force starts them all)"
    )
    assert 4 not in started
    assert (
        train(
            force=True,
            mesh={"dp": 2, "cp": 1, "tp": 2, "device": "cpu"},
            data={"num_workers": 8},
        )
        == 0
    )
