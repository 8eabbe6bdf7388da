"""No step waits for its device: nothing of ours reads a value of a tensor, or moves one and waits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ranks.spawn import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": True,
}
LLAMA, MOE = {"model_type": "llama", **SIZES}, {"model_type": "qwen3_moe", **SIZES, **EXPERTS}
WINDOWS = {"model_type": "gemma2", "sliding_window": 8, **SIZES}
# To where the weights are: the device itself, unless mesh.cpu_offload keeps them on the host, which has to wait.
TO_THE_WEIGHTS = (
    r"to a device (model/gradient_sums\.py:\d+ _square_sum"
    r"|training/(gradients\.py:\d+ (_multiply|clip|_sum)|step\.py:\d+ _update))"
)
# Masks in memory under cp, which are chosen where masks by blocks are not, find the keys that a half sees.
HALVED = r"nonzero context_parallel/local_attention\.py:\d+ _halved"
# Copies are compared after the first step and every audit.every of them; the ranks of a mesh are a tensor on the CPU.
COPIES = (
    r"\w+ (checkpoint/(copies|state)|mesh/mesh)\.py:\d+ (digest|<listcomp>|gather|sharded_axes)"
)
# It is on the CPU, unless a launcher's process group sends from the device alone.
GATHERED = r"to a device mesh/mesh\.py:\d+ gather"
# What ranks bring to a step is counted and digested where the loader has it, in the host's memory.
BROUGHT = r"\w+ (mesh/(exchange|mesh)\.py:\d+ (_bytes|agree)|training/step\.py:\d+ (<genexpr>|_num_targets))"
# What transformers does; `.to` of what is on the device already is no wait.
THEIRS = r"to a device (\w+/modeling_\w+|transformers/masking_utils)\.py:\d+ \w+"
# Mesh, model, and what else is asked for: rows of several documents, sequences that tp ranks share, bfloat16.
Case = tuple[dict[str, int], dict[str, Any], str]
ALONE: list[Case] = [
    ({}, LLAMA, "documents"),
    ({}, LLAMA, "bfloat16"),
    ({}, MOE, ""),
    ({}, WINDOWS, ""),
]
CASES: list[Case] = [
    ({"dp": 2}, LLAMA, ""),
    ({"dp": 2}, LLAMA, "bfloat16"),
    ({"dp": 2, "dp_shard": 2}, LLAMA, "documents"),
    ({"dp": 2, "dp_shard": 2}, MOE, ""),
    ({"tp": 2}, WINDOWS, ""),
    ({"tp": 2}, MOE, ""),
    ({"tp": 2}, LLAMA, "shared"),
    ({"cp": 2}, LLAMA, ""),
]


def _waits(cases: list[Case]) -> list[list[str]]:
    import torch

    from ranks.host_waits import HostWaits
    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.forward import token_loss_of
    from threefold.training.step import TrainStep

    found = []
    for sizes, model, special in cases:
        mesh = init_mesh(device="cpu", **sizes)
        shared = {"sequence_parallel": special == "shared"}
        asked = {"config": model, "dtype": "bfloat16" if special == "bfloat16" else "float32"}
        config = Config.model_validate(
            {"model": asked, "data": {"seq_len": 32}, "mesh": shared}
        )
        built = build(config, load.read_config(config.model), mesh)
        loss = token_loss_of(built, label_smoothing=0.1, z_loss=1e-4)
        step = TrainStep(
            built, build_optimizer(built.module, config.optimizer), token_loss=loss
        )
        tokens = torch.randint(257, (2, 33))
        batch = {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(32).expand(2, -1),
        }
        if special == "documents":
            batch["document_ids"] = (torch.arange(32) // 10).expand(2, -1)
        with HostWaits() as seen:
            step.run([batch, batch], lr=0.1)
        found.append([" ".join(each) for each in sorted(seen.found)])
    return found


def _unexpected(found: list[str]) -> list[str]:
    return [
        each
        for each in found
        if not re.fullmatch(
            "|".join([TO_THE_WEIGHTS, HALVED, COPIES, GATHERED, BROUGHT, THEIRS]), each
        )
    ]


@pytest.mark.parametrize("cases", [ALONE, CASES], ids=["one process", "two ranks"])
def test_a_step_waits_for_no_device(cases: list[Case]) -> None:
    ranks = 1 if cases is ALONE else 2
    for (sizes, model, _), found in zip(cases, run_ranks(_waits, ranks, cases)[0], strict=True):
        assert _unexpected(found) == [], (sizes, model["model_type"])
        assert found  # the watch sees what it is there for


def test_what_waits_is_seen() -> None:
    import torch

    from ranks.host_waits import HostWaits

    values = torch.arange(4.0, requires_grad=True)

    def reads(gradient: Any) -> None:
        gradient.sum().item()

    doubled = values * 2
    doubled.register_hook(reads)
    ways: dict[str, Any] = {
        "item": lambda: values.sum().item(),
        "__bool__": lambda: bool(values.sum() > 1),
        "nonzero": lambda: torch.nonzero(values),
        "index by a mask": lambda: values[values > 1],
        "tolist": lambda: values.tolist(),
        "to a device": lambda: values.to("cpu"),
        "tensor on a device": lambda: torch.tensor([1], device="cpu"),
        "repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
        "_local_scalar_dense": lambda: doubled.sum().backward(),
    }
    for name, way in ways.items():
        with HostWaits() as seen:
            way()
        assert name in {what for what, _ in seen.found}, name
