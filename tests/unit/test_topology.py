"""The mesh's arithmetic: every rank has one place, groups partition the ranks, and sizes follow one set of rules."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.config.schema import Config, MeshConfig
from threefold.errors import ConfigError
from threefold.mesh import environment, mesh
from threefold.mesh.topology import AXES, Topology, default_topology, resolve
from threefold.run.start import topology_of_run

SIZE = st.integers(1, 5)
TOPOLOGIES = st.builds(Topology, dp_replicate=SIZE, dp_shard=SIZE, cp=SIZE, tp=SIZE)
SUBSETS = [axes for count in range(5) for axes in itertools.combinations(AXES, count)]


def sizes(
    *, launched: int | None = None, devices: int | None = None, **keys: int | str
) -> tuple[int, int, int, int] | str:
    """(dp_replicate, dp_shard, cp, tp) of the mesh keys, or what is wrong with them."""
    values: dict[str, Any] = keys
    try:
        return resolve(MeshConfig(**values), launched_world_size=launched, num_devices=devices)[
            0
        ].sizes
    except ConfigError as error:
        (problem,) = error.problems
        return problem.what


# --- ranks and coordinates ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(topology=TOPOLOGIES)
def test_rank_and_coordinates_are_a_bijection(topology: Topology) -> None:
    """In row-major order of (dp_replicate, dp_shard, cp, tp): the last axis is the fastest."""
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert places == list(itertools.product(*(range(size) for size in topology.sizes)))


def test_tp_ranks_are_neighbours() -> None:
    topology = Topology(dp_replicate=2, cp=2, tp=2)
    assert topology.coordinates(5) == (1, 0, 0, 1)
    assert topology.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("dp_replicate", "dp_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@settings(deadline=None)
@given(topology=TOPOLOGIES)
def test_dp_rank_is_shared_by_cp_and_tp_alone(topology: Topology) -> None:
    for rank in range(topology.world_size):
        replicate, shard, _, _ = topology.coordinates(rank)
        assert topology.dp_rank(rank) == replicate * topology.dp_shard + shard
    assert topology.dp * topology.cp * topology.tp == topology.world_size


@settings(deadline=None)
@given(topology=TOPOLOGIES, axes=st.sampled_from(SUBSETS))
def test_groups_partition_the_ranks_and_vary_only_along_their_axes(
    topology: Topology, axes: tuple[str, ...]
) -> None:
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(
        range(topology.world_size)
    )
    assert {len(group) for group in groups} == {
        math.prod(topology.sizes[AXES.index(axis)] for axis in axes)
    }
    for group in groups:
        assert group == sorted(group)
        places = [topology.coordinates(rank) for rank in group]
        for axis, along in zip(AXES, zip(*places, strict=True), strict=True):
            assert axis in axes or len(set(along)) == 1


def test_text_says_how_dp_is_shared() -> None:
    assert str(Topology(dp_replicate=4, cp=2)) == "dp=4 x cp=2 x tp=1"
    assert str(Topology(dp_shard=4)) == "dp=4 (sharded) x cp=1 x tp=1"
    assert (
        str(Topology(dp_replicate=2, dp_shard=4, tp=2))
        == "dp=8 (2 replicas x 4 shards) x cp=1 x tp=2"
    )


# --- the default -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(world_size=st.integers(1, 4096))
def test_default_uses_every_rank_and_as_many_axes_as_fit(world_size: int) -> None:
    """A mesh of three axes of at least 2 exists for every multiple of 4 from 8 on, of two for every even number from 4.

    Odd numbers may have such a mesh too (9 = 3 x 3); they go to dp, which every model and row length can be split over.
    """
    mesh = default_topology(world_size)
    assert mesh.world_size == world_size
    wanted = (
        3
        if world_size % 4 == 0 and world_size > 4
        else 2
        if world_size % 2 == 0 and world_size > 2
        else 1
    )
    assert sum(size > 1 for size in (mesh.dp, mesh.cp, mesh.tp)) == (
        wanted if world_size > 1 else 0
    )
    assert mesh.dp_shard == 1 and mesh.cp <= 2 and mesh.tp <= 2


def test_default_of_small_machines() -> None:
    found = {
        ranks: (mesh.dp, mesh.cp, mesh.tp)
        for ranks in range(1, 17)
        if (mesh := default_topology(ranks))
    }
    assert found[1] == (1, 1, 1)
    assert found[2] == (2, 1, 1)
    assert found[3] == (3, 1, 1)
    assert found[4] == (2, 1, 2)
    assert found[6] == (3, 1, 2)
    assert found[8] == (2, 2, 2)
    assert found[12] == (3, 2, 2)
    assert found[16] == (4, 2, 2)


# --- what was asked for ------------------------------------------------------------------------------------------


def test_nothing_given() -> None:
    """dp = world size under a launcher; FSDP over the devices; 2 x 2 x 2 on a CPU."""
    assert sizes(launched=6) == (6, 1, 1, 1)
    assert sizes(launched=1) == (1, 1, 1, 1)
    assert sizes(launched=8, devices=8) == (8, 1, 1, 1)
    assert sizes(devices=8) == (1, 8, 1, 1)
    assert sizes(devices=1) == (1, 1, 1, 1)
    assert sizes() == (2, 1, 2, 2)


@pytest.mark.parametrize("key", ["dp", "cp", "tp"])
def test_one_given_leaves_the_others_at_one(key: str) -> None:
    found = sizes(**{key: 4})
    assert found == tuple(4 if axis == key else 1 for axis in ("dp", "dp_shard", "cp", "tp"))
    assert sizes(launched=4, **{key: 4}) == found


def test_one_given_as_one_asks_for_a_single_rank() -> None:
    assert sizes(tp=1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("dp", "dp_shard", "replicate_and_shard"),
    [
        (4, 1, (4, 1)),
        (4, 4, (1, 4)),
        (4, 2, (2, 2)),
        (4, "auto", (1, 4)),
        (6, 3, (2, 3)),
        (1, 1, (1, 1)),
    ],
)
def test_dp_shard(dp: int, dp_shard: int | str, replicate_and_shard: tuple[int, int]) -> None:
    """1: DDP; dp (or auto): FSDP; between: HSDP."""
    assert sizes(dp=dp, dp_shard=dp_shard, tp=2) == (*replicate_and_shard, 1, 2)


def test_dp_shard_alone_is_the_size_of_dp() -> None:
    assert sizes(dp_shard=4) == (1, 4, 1, 1)
    assert sizes(dp_shard=2, cp=2, launched=4) == (1, 2, 2, 1)
    assert sizes(dp_shard=2, cp="auto", launched=8) == (1, 2, 4, 1)
    assert sizes(dp_shard=2, tp="auto") == (1, 2, 1, 4)


@settings(deadline=None)
@given(
    dp=SIZE,
    cp=SIZE,
    tp=SIZE,
    open_axis=st.sampled_from(["dp", "cp", "tp"]),
    where=st.sampled_from("ld"),
)
def test_auto_fills_one_axis_from_the_rest(
    dp: int, cp: int, tp: int, open_axis: str, where: str
) -> None:
    keys: dict[str, Any] = {"dp": dp, "cp": cp, "tp": tp}
    keys[open_axis] = "auto"
    world = dp * cp * tp
    found = sizes(**keys, launched=world) if where == "l" else sizes(**keys, devices=world)
    assert found == (dp, 1, cp, tp)


def test_auto_without_launcher_and_devices_fills_eight_ranks() -> None:
    assert sizes(dp="auto", tp=2) == (4, 1, 1, 2)
    assert sizes(dp="auto", dp_shard="auto", cp=2) == (1, 4, 2, 1)
    assert sizes(dp="auto", dp_shard=2) == (4, 2, 1, 1)


@settings(deadline=None)
@given(dp=SIZE, cp=SIZE, tp=SIZE, launched=st.integers(1, 130))
def test_world_size_is_the_product_or_an_error(
    dp: int, cp: int, tp: int, launched: int
) -> None:
    found = sizes(dp=dp, cp=cp, tp=tp, launched=launched)
    if launched == dp * cp * tp:
        assert found == (dp, 1, cp, tp)
    else:
        assert found == (
            f"mesh.dp x mesh.cp x mesh.tp = {dp} x {cp} x {tp} = {dp * cp * tp}, but {launched} ranks were started"
        )


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert sizes(dp=4, dp_shard=3) == "mesh.dp_shard = 3 does not divide mesh.dp = 4"
    with pytest.raises(ConfigError) as refused:
        resolve(MeshConfig(dp=1, dp_shard=2))
    assert refused.value.problems[0].fix == "--mesh.dp_shard 1"
    assert sizes(dp=2, dp_shard=4) == "mesh.dp_shard = 4 does not divide mesh.dp = 2"
    assert (
        sizes(dp="auto", cp="auto")
        == "mesh.dp = auto and mesh.cp = auto leave more than one axis open"
    )
    assert (
        sizes(dp="auto", tp=3, launched=8)
        == "mesh.dp = auto cannot be filled: 8 ranks are not a multiple of 3"
    )
    assert (
        sizes(dp="auto", tp=16, devices=8)
        == "mesh.dp = auto cannot be filled: 8 ranks are not a multiple of 16"
    )
    assert sizes(dp_shard=3, cp="auto", launched=8) == (
        "mesh.cp = auto cannot be filled: 8 ranks are not a multiple of 3"
    )


def test_reason_is_given_with_the_sizes() -> None:
    def why(launched: int | None, devices: int | None, **keys: Any) -> str:
        return resolve(MeshConfig(**keys), launched_world_size=launched, num_devices=devices)[1]

    assert why(4, None) == "dp is the launcher's world size: no mesh key was given"
    assert why(None, 4) == "FSDP over 4 devices: no mesh key was given"
    assert why(None, None) == "the default on a CPU"
    assert why(None, None, dp=2) == "as given"
    assert why(4, None, dp="auto", tp=2) == "dp filled from 4 ranks"


LLAMA = {"model_type": "llama", "hidden_size": 36, "num_attention_heads": 9}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, None),
        ({"model": {"config": {**LLAMA, "hidden_size": 32, "num_attention_heads": 8}}}, None),
        ({"model": {"config": LLAMA}}, "mesh.tp = 2 cannot divide"),
        ({"model": {"config": {"model_type": "gpt2"}}}, "no tensor-parallel plan for 'gpt2'"),
        ({"train": {"global_batch": 3}}, "train.global_batch = 3 cannot be divided equally among 2 dp ranks"),
        ({"data": {"seq_len": 30}}, "data.seq_len = 30 cannot be split over 2 cp ranks"),
    ],
)  # fmt: skip
def test_default_mesh_is_one_process_where_it_cannot_be_used(
    values: Any, says: str | None
) -> None:
    config = Config(**values, mesh={"device": "cpu"})
    topology, why = topology_of_run(config)
    if says is None:
        assert (topology, why) == (default_topology(8), "the default on a CPU")
        return
    assert topology == Topology()
    assert why.startswith(
        "the default on a CPU is dp=2 x cp=2 x tp=2, which this run cannot use: "
    )
    assert says in why
    # Sizes that were asked for are not replaced: a check of its own refuses them.
    given = config.model_copy(update={"mesh": MeshConfig(dp=2, cp=2, tp=2, device="cpu")})
    assert topology_of_run(given) == (default_topology(8), "as given")


def test_what_no_mesh_can_do_leaves_the_default() -> None:
    config = Config(train={"global_batch": 8, "micro_batch": 3}, mesh={"device": "cpu"})
    assert topology_of_run(config)[1] == "the default on a CPU"


@pytest.mark.parametrize(
    ("variables", "sizes", "expected"),
    [
        ({"DP_SIZE": "2", "TP_SIZE": "2"}, {}, (2, 1, 2)),
        ({"DP_SIZE": "2", "CP_SIZE": "2"}, {}, (2, 2, 1)),
        ({"DP_SIZE": "auto", "CP_SIZE": "2"}, {}, (2, 2, 1)),
        ({"TP_SIZE": "4"}, {"dp": 2, "tp": 2}, (2, 1, 2)),
        ({}, {}, (4, 1, 1)),
    ],
    ids=str,
)
def test_a_mesh_takes_its_sizes_from_the_variables_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    sizes: dict[str, int],
    expected: tuple[int, int, int],
) -> None:
    for name in ("DP_SIZE", "CP_SIZE", "TP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    info = environment.LaunchInfo(rank=0, world_size=4, launcher="torchrun")
    monkeypatch.setattr(environment, "current", lambda: info)
    monkeypatch.setattr(mesh, "join_mesh", lambda topology, *info, **settings: topology)
    found: Any = mesh.init_mesh(**sizes)
    assert (found.dp, found.cp, found.tp) == expected


@pytest.mark.parametrize("size", ["", "two", "0", "-1", "2.0"])
def test_a_variable_that_is_no_size_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("TP_SIZE", size)
    with pytest.raises(ConfigError, match=f"TP_SIZE is '{size}'"):
        mesh.init_mesh()
