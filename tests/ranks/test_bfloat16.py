"""bfloat16 is one arithmetic: what is cast, what stays float32, and how far a mesh is from one process."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, compare_curves, curve_bounds, make_batches, require
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

Sizes = tuple[int, int, int, int]
STEPS, ROWS, SEQ_LEN, LR = 20, 8, 16, 1e-3
_SIZES = {name: value for name, value in TINY_LLAMA.items() if name != "model_type"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA,
    # Experts and a router in the model's type.
    "qwen3_moe": {
        **{
            "model_type": "qwen3_moe",
            **_SIZES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
        },
        **{"moe_intermediate_size": 32, "norm_topk_prob": True},
    },
    # A router that computes in float32.
    "deepseek_v3": {
        **{
            "model_type": "deepseek_v3",
            **_SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
        },
        **{
            "num_experts_per_tok": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        **{
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    },
    # Norms and attention sinks in float32.
    "gpt_oss": {
        **{
            "model_type": "gpt_oss",
            **_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
        },
        **{"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    # State-space layers, whose decays are float32.
    "mamba2": {
        **{
            "model_type": "mamba2",
            "vocab_size": 67,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
        },
        **{
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "initializer_range": 0.2,
        },
    },
}
KEPT = {
    "llama": set(),
    "qwen3_moe": set(),
    "deepseek_v3": {"mlp.gate.weight"},
    "gpt_oss": {
        "norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.sinks",
    },
    "mamba2": {"mixer.A_log", "mixer.D", "mixer.dt_bias"},
}
MESHES: dict[int, list[Sizes]] = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(2, 2, 1, 1)],
    8: [(1, 2, 2, 2)],
}
# cp cannot split a recurrence; transformers plans neither of them over tp.
NOT_SPLIT = {("mamba2", 2), ("mamba2", 3), ("gpt_oss", 3)}

# A rank of the data axes computes what a micro-batch of one process does; only the order of float32 sums is its own.
DATA = curve_bounds(1e-6, 1e-6, "another order of float32 sums")
# tp and cp round partial sums to bfloat16: in the first step, and over 20 steps, in which every update carries it on.
# One process in two micro-batches instead of one is as far from itself (docs/models.md).
FIRST = curve_bounds(5e-3, 3e-3, "sums rounded to bfloat16")
ALL = curve_bounds(6e-2, 5e-2, "sums rounded to bfloat16, carried on by 20 updates")


def curves(
    world: int, names: list[str], pieces: tuple[int, ...]
) -> dict[tuple[str, Sizes, int], Any]:
    """Of each model on each mesh of so many ranks: losses and norms, and the types of parameters and hidden states.

    Args:
        pieces: numbers of micro-batches of a single process; a dp rank has one.
    """
    return {
        (name, sizes, count): _curve(sizes, MODELS[name], count)
        for name in names
        for sizes in MESHES[world]
        if not any(sizes[axis] > 1 and (name, axis) in NOT_SPLIT for axis in (2, 3))
        for count in (pieces if world == 1 else (1,))
    }


def _curve(sizes: Sizes, model: dict[str, Any], pieces: int) -> Any:
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    replicate, shard, cp, tp = sizes
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = validate(
        {
            "model": {"config": model, "dtype": "bfloat16"},
            "optimizer": {"lr": LR},
            "data": {"seq_len": SEQ_LEN},
        }
    )
    built = build(config, load.read_config(config.model), mesh)
    types: dict[str, str] = {}
    layers = load.layers_of(built.module)
    for path, module in built.module.named_modules():

        def note(module: Any, inputs: Any, output: Any, path: str = path) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                types[f"{path}.{name}"] = str(parameter.dtype)
            if module in layers:
                types["hidden states"] = str(
                    (output[0] if isinstance(output, tuple) else output).dtype
                )

        module.register_forward_hook(note)
    # Without clipping: the norm, a sum in another order, would scale all gradients.
    step = TrainStep(built, build_optimizer(built.module, config.optimizer), grad_clip=0.0)
    found = []
    for batch in make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN):
        parts = mesh.dp_size if mesh.dp_size > 1 else pieces
        own = [
            {name: rows[part::parts].contiguous() for name, rows in batch.items()}
            for part in range(parts)
        ]
        result = step.run(own if mesh.dp_size == 1 else [own[mesh.dp_rank]], lr=LR)
        found.append((mean_loss(result, mesh), result.grad_norm.item()))
    return found, types


@pytest.mark.parametrize(
    ("name", "worlds"),
    [
        ("llama", (2, 4, 8)),
        pytest.param("deepseek_v3", (2, 4, 8), marks=pytest.mark.long),
        pytest.param("qwen3_moe", (2, 4, 8), marks=pytest.mark.long),
        # Its float32 weights are whole on every rank, beside the shards.
        ("gpt_oss", (2,)),
        pytest.param("gpt_oss", (4,), marks=pytest.mark.long),
        pytest.param("mamba2", (2, 4), marks=pytest.mark.long),
    ],
)
def test_mesh_computes_what_one_process_computes(name: str, worlds: tuple[int, ...]) -> None:
    one = run_ranks(curves, 1, 1, [name], (1, 2, 4))[0]
    alone = {pieces: curve for (_, _, pieces), (curve, _) in one.items()}
    print(f"{name}: one process in 2 micro-batches: {compare_curves(alone[2], alone[1], ALL)}")
    for world in worlds:
        ranks = run_ranks(curves, world, world, [name], (1,))
        for (_, sizes, _), (curve, types) in ranks[0].items():
            assert all(rank[name, sizes, 1][0] == curve for rank in ranks), (
                "ranks disagree about the loss"
            )
            expected = alone[sizes[0] * sizes[1]]
            of_data = sizes[2] == sizes[3] == 1
            comparison = require(
                compare_curves(curve, expected, DATA if of_data else ALL), sizes
            )
            first = require(
                compare_curves(curve[:1], expected[:1], DATA if of_data else FIRST), sizes
            )
            print(f"{name} {sizes}: {comparison}; first step {first}")
            assert kept_in(types) == KEPT[name], sizes
    assert kept_in(one[name, (1, 1, 1, 1), 1][1]) == KEPT[name]


def kept_in(types: dict[str, str]) -> set[str]:
    """The parameters that a forward had in float32, without their layers' paths; the others were in bfloat16."""
    assert types.pop("hidden states") == (
        "torch.float32" if any("mixer" in each for each in types) else "torch.bfloat16"
    )
    assert {*types.values()} <= {"torch.float32", "torch.bfloat16"}
    kept = [name.split(".") for name, dtype in types.items() if dtype == "torch.float32"]
    assert any(dtype == "torch.bfloat16" for dtype in types.values())
    return {".".join(parts[3:] if "layers" in parts else parts[1:]) for parts in kept}


def _alone_among_others() -> tuple[bool, float]:
    """Whether a process group is left, and a step's loss on rank 0 while the other ranks do something else."""
    import torch
    import torch.distributed as dist

    from threefold.config.loading import validate
    from threefold.mesh.mesh import Mesh, init_mesh
    from threefold.mesh.topology import Topology
    from threefold.model import load
    from threefold.model.build import build
    from threefold.training.step import TrainStep

    several = dist.is_initialized()
    mesh = (
        Mesh(Topology(), dist.get_rank(), torch.device("cpu"))
        if several
        else init_mesh(device="cpu")
    )
    loss = 0.0
    if mesh.rank == 0:
        config = validate({"model": {"config": TINY_LLAMA, "dtype": "bfloat16"}})
        for _ in range(1 if several else 2):  # a second mesh of the same process
            step = TrainStep(build(config, load.read_config(config.model), mesh), lr=LR)
            loss = [
                step(batch).loss for batch in make_batches(steps=2, rows=4, seq_len=SEQ_LEN)
            ][-1]
            mesh = mesh if several else init_mesh(device="cpu")
    if several:
        dist.barrier()
    else:
        mesh.close()
    return dist.is_initialized(), loss


def test_one_process_needs_no_other_and_leaves_no_group_behind() -> None:
    (left, alone), ranks = (
        run_ranks(_alone_among_others, 1)[0],
        run_ranks(_alone_among_others, 2),
    )
    assert ranks == [(True, alone), (True, 0.0)]
    assert not left
