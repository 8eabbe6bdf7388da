"""Counts what a step's gathers and reductions run beside, of the first of 8 or 64 ranks, in torch's fake process group.

    python benchmarks/overlap.py [--model 8B] [--meshes "dp_shard 8" "dp_shard 64" "dp_shard 8 tp 8"]

The trace of `threefold plan` takes a real step of FSDP2 without values. A gather is on its way from when the one before
it was received until it is waited for; a reduction from when its unit's gradients are there until those of the next one
are. Products that are computed meanwhile run beside it, and their operations are counted. What has none is alone, and
every device waits for it. Before is with the embedding, the last norm and the head in one unit. No time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from threefold.config.loading import validate
from threefold.mesh.topology import resolve
from threefold.model import data_parallel, load
from threefold.model.collectives import local_part
from threefold.plan.live_tensors import LiveTensors
from threefold.run.plan_trace import trace

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
MODELS = {
    "8B": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "70B": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
}
MESHES = ("dp_shard 8", "dp_shard 64", "dp_shard 8 tp 8")


@dataclass
class Sent:
    """Gathers, or reductions: (bytes, operations of products beside it) of each."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def row(self) -> str:
        beside = [(size, products) for size, products in self.found if products]
        alone = [size for size, products in self.found if not products]
        least = min((products / size for size, products in beside), default=0.0)
        return f"{len(beside)} | {_gib(size for size, _ in beside)} | {least:,.0f} | {len(alone)} | {_gib(alone)}"


def _gib(sizes: Any) -> str:
    return f"{sum(sizes) / 2**30:.2f}"


class Watched:
    """Products, gathers and reductions of a step in their order."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.gathers, self.reductions = Sent(), Sent()
        self._products = 0
        self._received = 0
        self._reducing: tuple[int, int] | None = None  # bytes, products until then

    @contextmanager
    def watching(self) -> Iterator[None]:
        dispatch, wait = LiveTensors.__torch_dispatch__, FSDPParamGroup.wait_for_unshard
        reduce, enter = FSDPParamGroup.post_backward, LiveTensors.__enter__

        def entered(mode: Any) -> Any:
            self._forget()  # the first step makes buffers
            return enter(mode)

        def dispatched(
            mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._opname in ("mm", "bmm", "addmm"):
                one, other = args[-2:]
                self._products += 2 * one.numel() * other.shape[-1]
            return dispatch(mode, func, types, args, kwargs)

        def waited(group: Any) -> None:
            if group._all_gather_result is not None:
                size = sum(
                    each.numel()
                    for each in group.fsdp_params
                    for each in each.all_gather_inputs
                )
                self._receive(size * group.mesh_info.shard_mesh_size * 2)
            wait(group)

        def reduced(group: Any, *unused: Any) -> None:
            whole = sum(local_part(each).numel() for each in _gradients(group))
            if whole:
                self._reduce(4 * whole)
            reduce(group, *unused)

        with (
            mock.patch.object(LiveTensors, "__enter__", entered),
            mock.patch.object(LiveTensors, "__torch_dispatch__", dispatched),
            mock.patch.object(FSDPParamGroup, "wait_for_unshard", waited),
            mock.patch.object(FSDPParamGroup, "post_backward", reduced),
        ):
            yield
        self._reduce(0)

    def _receive(self, size: int) -> None:
        self.gathers.found.append(
            (size, self._products - self._received if self.gathers.found else 0)
        )
        self._received = self._products

    def _reduce(self, size: int) -> None:
        if self._reducing is not None:
            self.reductions.found.append(
                (self._reducing[0], self._products - self._reducing[1])
            )
        self._reducing = (size, self._products) if size else None


def _gradients(group: Any) -> Iterator[torch.Tensor]:
    for each in group.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            whole = each.unsharded_accumulated_grad
            whole = each.unsharded_param.grad if whole is None else whole
            if whole is not None:
                yield whole


def watched(model: str, mesh: str, *, apart: bool) -> Watched:
    """A step of 2 rows of 8,192 tokens, in bfloat16."""
    words = mesh.split()
    sizes = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    values = {
        "model": {"config": {**_LLAMA, **MODELS[model]}, "dtype": "bfloat16"},
        "data": {"seq_len": 8192},
        "mesh": {"dp": sizes["dp_shard"], **sizes},
        "train": {"micro_batch": 2, "global_batch": 2 * sizes["dp_shard"], "compile": False},
    }
    config = validate(values)
    ranks = sizes["dp_shard"] * sizes.get("tp", 1)
    topology, _ = resolve(config.mesh, launched_world_size=ranks, num_devices=None)
    found = Watched()
    ends = data_parallel._ends if apart else lambda *of: []
    with found.watching(), mock.patch.object(data_parallel, "_ends", ends):
        trace(config, load.read_config(config.model), topology)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    options = parser.parse_args()
    print(f"{options.model}, 2 rows of 8,192 tokens a rank, bfloat16\n")
    print(
        "| mesh | sent | beside products: calls | GiB | operations a byte, least | alone: calls | GiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for mesh in options.meshes:
        for name, apart in (("before", False), ("now", True)):
            found = watched(options.model, mesh, apart=apart)
            print(f"| {mesh}, {name} | gathers | {found.gathers.row()} |")
            print(f"| {mesh}, {name} | reductions | {found.reductions.row()} |", flush=True)


if __name__ == "__main__":
    main()
