"""Offloaded shards and explicit prefetch change where things are and when they move, not what is computed."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.spawn import run_ranks
from threefold.config.schema import MeshConfig
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.model import data_parallel

DEEP = {**LLAMA, "num_hidden_layers": 4}


def _steps(sizes: Sizes, folder: str, settings: dict[str, Any]) -> Any:
    data_parallel._UNIT_BYTES = 1  # every layer is gathered by itself, small as it is
    run = Miniature(sizes, folder, model={"config": DEEP}, mesh=settings)
    gathered = []
    for name, module in run.model.module.named_modules():
        if settings.get("prefetch") and hasattr(module, "set_modules_to_forward_prefetch"):
            gathered.append((name, len(module._get_fsdp_state()._states_to_forward_prefetch)))
    return [(loss, norm) for loss, norm, _ in run.advance(3)], gathered


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("settings", [{"cpu_offload": True}, {"prefetch": 2}], ids=str)
def test_settings_of_sharding_give_the_same_bits(
    sizes: Sizes, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder)
    ranks = sizes[0] * sizes[1] * sizes[3]
    plain = run_ranks(_steps, ranks, sizes, str(folder / "plain"), {})[0]
    found = run_ranks(_steps, ranks, sizes, str(folder / "other"), settings)[0]
    assert found[0] == plain[0]
    if "prefetch" in settings:
        layers = [ahead for name, ahead in found[1] if ".layers." in f".{name}"]
        assert layers == [2, 2, 1, 0]


def _said(device: str, sizes: tuple[int, int, int, int], **settings: Any) -> str:
    found = data_parallel.problems(MeshConfig.model_validate(settings), Topology(*sizes), device=device)
    return str(ConfigError.of(found)) if found else ""


def test_settings_without_effect_are_refused() -> None:
    assert _said("cuda", (1, 2, 1, 1), cpu_offload=True, prefetch=2) == ""
    assert _said("cpu", (1, 2, 1, 1), cpu_offload=True) == (
        "mesh.cpu_offload = true has no effect on a CPU\n"
        "  expected: an accelerator with memory of its own\n"
        "  fix: leave mesh.cpu_offload out"
    )
    assert _said("cuda", (4, 1, 1, 1), prefetch=2) == (
        "mesh.prefetch = 2, but nothing is sharded (dp_shard is 1: torch's DistributedDataParallel, every rank holds a "
        "whole model)\n"
        "  expected: weights that are shared by several data ranks\n"
        "  fix: --mesh.dp_shard 4   (FSDP2), or leave mesh.prefetch out"
    )
