"""`train.reduce: exact`: weights have one hash whatever the number of data ranks, where plain sums give several."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import pytest

from long_tests import chosen
from ranks.reference import TINY_LLAMA, make_batches
from ranks.spawn import run_ranks

# Copies, shards, cp, tp.
Sizes = tuple[int, int, int, int]
Splits = tuple[Sizes, ...]


def _splits(*data_ranks: int, cp: int = 1, tp: int = 1) -> Splits:
    """All splits into copies and shards of several numbers of data ranks."""
    return tuple(
        (dp // shards, shards, cp, tp)
        for dp in data_ranks
        for shards in (1, 2, 4, 8)
        if not dp % shards
    )


FEW = ((1, 1, 1, 1), (2, 2, 1, 1))
ALL = _splits(1, 2, 4)
# Sizes whose shards are no multiples of a vector's 8 or 16 numbers.
ODD = {
    **TINY_LLAMA,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TIED = {**ODD, "tie_word_embeddings": True}  # with 67 entries, which no number of ranks divides
QWEN3 = {**ODD, "model_type": "qwen3", "head_dim": 18}
GPT2 = {
    **{
        "model_type": "gpt2",
        "n_embd": 36,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "vocab_size": 67,
    },
    "initializer_range": 0.2,  # and dropout of 0.1 in three places, the type's own
}
# Sizes that two tp ranks, and the products of experts, can divide.
EVEN = {**TINY_LLAMA, "hidden_size": 40, "intermediate_size": 48}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MIXTRAL = {
    **{**EVEN, **ROUTED, "model_type": "mixtral", "num_local_experts": 3},
    **{"router_jitter_noise": 0.1, "attention_dropout": 0.1},
}
QWEN3_MOE = {
    **EVEN,
    **ROUTED,
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
STEPS, ROWS = 3, 8
# What differs from a llama in float32 under AdamW: sections of the config, the number of steps, and factors of the
# loss of single micro-batches of the global batch.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "small blocks": {"block": 7},
    "large and small": {"steps": 2, "factors": {1: 1e12, 2: 1e-12}},
    "drops": {
        "model": {
            "lora": {"r": 2, "dropout": 0.1},
            "config": {**ODD, "attention_dropout": 0.1},
        },
        "steps": 3,
    },
    "first is nothing": {"steps": 2, "factors": {0: 0.0}},
    "not finite": {"steps": 2, "factors": {3: float("inf")}},
}


def _of_type(name: str, **keys: Any) -> dict[str, Any]:
    return {"model": {"config": {**ODD, "model_type": name, **keys}}}


# Each of these is admitted because it is compared here.
MORE: dict[str, dict[str, Any]] = {
    "llama longer": {"steps": 20},
    "llama bfloat16": {"model": {"dtype": "bfloat16"}},
    "tied bfloat16": {"model": {"config": TIED, "dtype": "bfloat16"}},
    "tied": {"model": {"config": TIED}},
    "qwen3": {"model": {"config": QWEN3}},
    "qwen3 bfloat16": {"model": {"config": QWEN3, "dtype": "bfloat16"}},
    "qwen2": _of_type("qwen2"),
    "mistral": _of_type("mistral"),
    "gemma2": _of_type("gemma2", head_dim=18),
    "olmo2": _of_type("olmo2"),
    "phi3": _of_type("phi3", pad_token_id=0),
    "groups": {
        "optimizer": {"lr": 3e-3, "groups": [{"match": "mlp", "lr": 1e-3, "weight_decay": 0.0}]}
    },
    "narrow moments": {"optimizer": {"moments": "bfloat16"}},
    "average": {"optimizer": {"ema": 0.9}},
    "sgd": {"optimizer": {"name": "sgd", "options": {"momentum": 0.9, "nesterov": True}}},
    "sgd dampened": {
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9, "dampening": 0.5}}
    },
    "sgd plain": {"optimizer": {"name": "sgd"}},
    "smoothed": {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "chunks": {"train": {"loss_chunk_tokens": 8}},
    "documents": {"documents": True},
    "full": {"train": {"activation_checkpointing": "full"}},
    "selective": {"train": {"activation_checkpointing": "selective"}},
    "adapters": {"model": {"lora": {"r": 2}}},
    "adapters bfloat16": {"model": {"lora": {"r": 2}, "dtype": "bfloat16"}},
    "gpt2 drops": {"model": {"config": GPT2}},
    "gpt2 drops bfloat16": {"model": {"config": GPT2, "dtype": "bfloat16"}},
    "attention drops": _of_type("llama", attention_dropout=0.1),
    "adapters drop": {"model": {"lora": {"r": 2, "dropout": 0.1}}},
    "mixtral": {"model": {"config": MIXTRAL}},
    "mixtral bfloat16": {"model": {"config": MIXTRAL, "dtype": "bfloat16"}},
    "qwen3_moe": {"model": {"config": QWEN3_MOE}},
    "qwen3_moe bfloat16": {"model": {"config": QWEN3_MOE, "dtype": "bfloat16"}},
}


def _long(name: str, sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For 50 steps on all splits of 1, 2, 4 and 8 data ranks, with dropout; two ranks of eight have no target."""
    drops, tied = {**sizes, "attention_dropout": 0.1}, {**sizes, "tie_word_embeddings": True}
    types: dict[str, dict[str, Any]] = {
        "llama": {"config": drops},
        "tied": {"config": {**drops, "tie_word_embeddings": True}},
        "qwen3": {"config": {**drops, "model_type": "qwen3", "head_dim": 18}},
        "gemma2": {"config": {**drops, "model_type": "gemma2", "head_dim": 18}},
        "mixtral": {"config": MIXTRAL},
        "adapters": {"config": tied, "lora": {"r": 2, "dropout": 0.1}},
    }
    same = {"train": {"micro_batch": 1}, "steps": 50, "unit_bytes": 2**20}
    return {
        f"{name} {kind} {dtype}": {**same, "model": {**model, "dtype": dtype}}
        for kind, model in types.items()
        for dtype in ("float32", "bfloat16")
    }


LONG, LONG_WIDER = _long("long", ODD), _long("long wide", EVEN)
# On two cp ranks, on two tp ranks, on both.
WIDER: dict[str, dict[str, Any]] = {
    "wide llama": {"model": {"config": {**EVEN, "attention_dropout": 0.1}}},
    "wide adapters": {
        "model": {"config": EVEN, "lora": {"r": 2, "dropout": 0.1}, "dtype": "bfloat16"}
    },
    "wide tied": {
        "model": {"config": {**EVEN, "tie_word_embeddings": True}, "dtype": "bfloat16"}
    },
    "wide mixtral": {"model": {"config": MIXTRAL}},
}
HOW: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ulysses": ({"cp": 2}, {"model": {"config": EVEN}, "mesh": {"cp_method": "ulysses"}}),
    "gather": ({"cp": 2}, {"model": {"config": EVEN}, "mesh": {"cp_method": "gather"}}),
    "scattered": ({"tp": 2}, {"model": {"config": EVEN}, "mesh": {"sequence_parallel": True}}),
    "scattered adapters": (
        {"tp": 2},
        {
            "model": {"config": EVEN, "lora": {"r": 2}, "dtype": "bfloat16"},
            "mesh": {"sequence_parallel": True},
        },
    ),
    "computed again": (
        {"tp": 2},
        {"model": {"config": EVEN}, "train": {"activation_checkpointing": "full"}},
    ),
    "documents of cp": ({"cp": 2}, {"model": {"config": EVEN}, "documents": True}),
    "large and small on cp": (
        {"cp": 2},
        {"model": {"config": EVEN}, "steps": 2, "factors": {1: 1e12, 2: 1e-12}},
    ),
    "first is nothing on tp": (
        {"tp": 2},
        {"model": {"config": EVEN}, "steps": 2, "factors": {0: 0.0}},
    ),
    "whole": ({"tp": 2}, {"model": {"config": EVEN}, "mesh": {"sequence_parallel": False}}),
}


def _trained(
    sizes: Sizes, case: dict[str, Any], reduce: str
) -> tuple[str, list[tuple[float, float]], int]:
    """(hash of weights, curve, micro-batches that this rank went through)."""
    import torch

    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.model.exact import sums
    from threefold.optim.build import build_optimizer
    from threefold.optim.ema import Ema
    from threefold.plan import choices
    from threefold.training.batches import micro_batches, with_noise
    from threefold.training.forward import token_loss_of
    from threefold.training.numbers import mean_loss
    from threefold.training.step import TrainStep

    choices.UNIT_BYTES = case.get("unit_bytes", 1)  # each layer is a unit, small as it is
    sums._BLOCK = case.get("block", 2**16)
    copies, shards, cp, tp = sizes
    mesh = init_mesh(copies * shards, dp_shard=shards, cp=cp, tp=tp, device="cpu")
    sections = {"model": {"config": ODD}, "data": {"seq_len": 16}, "optimizer": {}, "mesh": {}}
    size = case.get("train", {}).get("micro_batch", 2)
    sections["train"] = {"global_batch": ROWS, "micro_batch": size, "reduce": reduce}
    config = validate(
        {name: {**values, **case.get(name, {})} for name, values in sections.items()}
    )
    model = build(config, load.read_config(config.model), mesh)
    asked = config.train
    loss = token_loss_of(model, label_smoothing=asked.label_smoothing, z_loss=asked.z_loss)
    decay = config.optimizer.ema
    ema = Ema(model.module, decay, exact=reduce == "exact") if decay is not None else None
    optimizer = build_optimizer(model.module, config.optimizer, mesh, exact=reduce == "exact")
    step = TrainStep(model, optimizer, grad_clip=0.5, token_loss=loss, ema=ema)
    factors = case.get("factors", {})
    backward, calls = step._go_backward, [0]
    own = ROWS // size // mesh.dp_size

    def planted(objective: Any) -> None:
        number = mesh.dp_rank + mesh.dp_size * (calls[0] % own)
        calls[0] += 1
        backward(objective * factors.get(number, 1.0) * case.get("growth", 1.0) ** calls[0])

    step._go_backward = planted  # type: ignore[method-assign]
    curve = []
    for number, batch in enumerate(
        make_batches(steps=case.get("steps", STEPS), rows=ROWS, seq_len=16)
    ):
        batch["labels"][3::4] = -100  # with four data ranks, the last has no target
        if case.get("documents"):
            batch["document_ids"] = (
                torch.arange(16) >= torch.arange(3, 3 + ROWS)[:, None]
            ).long()
            batch["position_ids"] = torch.where(
                batch["document_ids"] > 0,
                batch["position_ids"] - torch.arange(3, 3 + ROWS)[:, None],
                batch["position_ids"],
            )
        rows = {name: values[mesh.dp_rank :: mesh.dp_size] for name, values in batch.items()}
        spread = reduce == "exact"
        pieces = with_noise(
            micro_batches(rows, size, spread=spread), model, seed=0, step=number, spread=spread
        )
        result = step.run(pieces, lr=3e-3)
        curve.append((mean_loss(result, mesh), result.grad_norm.item()))
    state = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    }
    state |= ema.state() if ema is not None else {}
    hashed = hashlib.sha256()
    for name, parameter in state.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        hashed.update(
            name.encode() + whole.detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return hashed.hexdigest(), curve, calls[0]


Found = dict[tuple[str, Sizes], Any]


def _all(splits: Splits, names: list[str]) -> Found:
    found: Found = {}
    for sizes in splits:
        for name in names:
            found[name, sizes] = _trained(
                sizes,
                {
                    **CASES,
                    **MORE,
                    **WIDER,
                    **LONG,
                    **LONG_WIDER,
                    **{way: case for way, (_, case) in HOW.items()},
                }[name],
                "exact",
            )
    if "llama" in names:
        found["fast", splits[0]] = _trained(splits[0], {}, "fast")
    return found


@functools.cache
def _everywhere(splits: tuple[Sizes, ...], *names: str) -> Found:
    """What was trained on each mesh, the same on all of its ranks."""
    found: Found = {}
    for num_ranks in sorted({math.prod(sizes) for sizes in splits}):
        own = tuple(sizes for sizes in splits if math.prod(sizes) == num_ranks)
        of_ranks = run_ranks(_all, num_ranks, own, list(names), timeout_s=900)
        for key, (hashed, curve, _) in of_ranks[0].items():
            assert all(other[key][0] == hashed for other in of_ranks), key
            assert repr([other[key][1] for other in of_ranks]) == repr([curve] * num_ranks), key
        found |= of_ranks[0]
    return found


def _of(name: str, found: Found) -> list[Any]:
    return [each for (case, _), each in sorted(found.items()) if case == name]


def _run_too(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """Those of the names whose cases are run, which are trained by the same ranks."""
    of_cases = chosen(request, "name")
    return [name for name in names if name in of_cases]


def _refuse_several(name: str, splits: tuple[Sizes, ...], names: Iterable[str]) -> None:
    of_meshes = _of(name, _everywhere(splits, *names))
    assert len(of_meshes) == len(splits)
    assert len({hashed for hashed, _, _ in of_meshes}) == 1
    assert len({repr(curve) for _, curve, _ in of_meshes}) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_weights_losses_and_norms_have_the_same_bits_on_any_number_of_data_ranks(
    name: str,
) -> None:
    _refuse_several(name, FEW, CASES)


# One of each mechanism; the others differ by the family or the type of the computation.
KINDS = (
    "tied bfloat16",
    "qwen3",
    "gemma2",
    "groups",
    "average",
    "sgd",
    "smoothed",
    "chunks",
    "documents",
    "full",
)
KINDS += ("adapters bfloat16", "gpt2 drops", "attention drops", "mixtral bfloat16")


@pytest.mark.examples
@pytest.mark.parametrize("name", KINDS)
def test_and_so_for_one_of_each_kind_that_is_admitted(
    name: str, request: pytest.FixtureRequest
) -> None:
    _refuse_several(name, FEW, _run_too(request, KINDS))


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_and_so_for_what_is_admitted_on_every_split_of_up_to_4_data_ranks(name: str) -> None:
    _refuse_several(name, ALL, MORE)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_and_so_after_50_steps_on_up_to_8_data_ranks(name: str) -> None:
    _refuse_several(name, _splits(1, 2, 4, 8), [name])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("name", LONG_WIDER)
def test_and_so_after_50_steps_on_up_to_16_ranks(axes: dict[str, int], name: str) -> None:
    _refuse_several(name, _splits(1, 2, 4, 8, **axes), [name])


@pytest.mark.examples
@pytest.mark.parametrize("name", WIDER)
def test_and_so_on_two_cp_and_two_tp_ranks(name: str) -> None:
    """One data rank against two copies; each way of splitting below is against two shards."""
    _refuse_several(name, ((1, 1, 2, 2), (2, 1, 2, 2)), WIDER)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", WIDER)
def test_and_so_on_two_cp_or_tp_ranks(axes: dict[str, int], name: str) -> None:
    _refuse_several(name, _splits(1, 2, **axes), WIDER)


@pytest.mark.examples
@pytest.mark.parametrize("name", HOW)
def test_and_so_in_each_way_of_splitting(name: str, request: pytest.FixtureRequest) -> None:
    axes = {"cp": 1, "tp": 1, **HOW[name][0]}
    _refuse_several(
        name,
        ((1, 1, axes["cp"], axes["tp"]), (1, 2, axes["cp"], axes["tp"])),
        _run_too(request, [way for way, (others, _) in HOW.items() if others == HOW[name][0]]),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", HOW)
def test_and_so_in_each_way_of_splitting_on_every_split(name: str) -> None:
    _refuse_several(name, _splits(1, 2, **HOW[name][0]), [name])


@pytest.mark.ranks
def test_how_many_numbers_are_taken_together_changes_no_bit() -> None:
    found = _everywhere(FEW, *CASES)
    assert _of("small blocks", found)[0][:2] == _of("llama", found)[0][:2]


@pytest.mark.ranks
def test_plain_sums_have_not() -> None:
    # So that the test above could fail; and the curve of both is the same as far as floating point goes.
    found = _everywhere(FEW, "llama")
    plain = _of("fast", found)
    assert len({hashed for hashed, _, _ in plain}) > 1
    exact = _of("llama", found)[0][1]
    for _, curve, _ in plain:
        for own, other in zip(exact, curve, strict=False):
            assert own == pytest.approx(other, rel=2e-3)
        assert curve[0] == pytest.approx(exact[0], rel=1e-6)


def test_steps_whose_first_micro_batch_tells_too_little_are_computed_again() -> None:
    one = (1, 1, 1, 1)
    found = _everywhere((one,), "llama", "large and small", "first is nothing", "not finite")
    alone = {name: each for (name, _), each in found.items()}
    once = 2 * ROWS // 2
    assert alone["llama"][2] == STEPS * ROWS // 2
    assert alone["large and small"][2] == alone["first is nothing"][2] == 2 * once
    # What is not finite is found at once, and nothing is updated.
    assert alone["not finite"][2] == once
    assert all(norm != norm for _, norm in alone["not finite"][1])


def _growing() -> str:
    from threefold.errors import RunError

    with pytest.raises(RunError) as raised:
        _trained((1, 2, 1, 1), {"steps": 1, "growth": 1e3}, "exact")
    return str(raised.value)


def test_gradients_that_are_others_when_computed_again_end_the_run_on_every_rank() -> None:
    said = run_ranks(_growing, 2)
    assert (
        said[0] == said[1]
        and "a step that was computed again had different gradients" in said[0]
    )
