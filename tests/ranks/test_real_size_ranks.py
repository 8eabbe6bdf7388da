"""Faults of long rows and wide layers, which keep a model causal, are found by the comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SEQ_LEN = 256
Change = Callable[[Any, Any], Any]


def nothing(module: Any, output: Any) -> Any:
    return output


def scaled_by_the_place_in_the_tensor(module: Any, output: Any) -> Any:
    """As Llama 4 scales its queries, from token 64 on: a cp rank's part of a row begins at 0 again."""
    import torch

    places = torch.arange(output.shape[1], device=output.device)
    return output * (1 + 0.1 * (places // 64)[:, None])


def smaller_if_wide_and_split(module: Any, output: Any) -> Any:
    """Beyond a width that reduced models do not have, and only over tp."""
    from torch.distributed.tensor import DTensor

    split = isinstance(module.down_proj.weight, DTensor)
    return output * 0.9 if split and output.shape[-1] >= 192 else output


def _admitted(
    plant: Change, sizes: dict[str, int], model: dict[str, Any], data: dict[str, Any]
) -> str:
    from transformers.models.llama.modeling_llama import LlamaMLP

    from threefold.check.admit import admit
    from threefold.config.loading import validate
    from threefold.errors import ThreefoldError
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load

    plain = LlamaMLP.forward
    LlamaMLP.forward = lambda module, x: plant(module, plain(module, x))  # type: ignore[method-assign]
    mesh = init_mesh(device="cpu", **sizes)
    config = validate(
        {
            "data": {"seq_len": SEQ_LEN, **data},
            "model": {"config": {**LLAMA, **model}, "admission": "full"},
        }
    )
    try:
        return ": ".join(admit(config, load.read_config(config.model), mesh))
    except ThreefoldError as error:
        return str(error)


# Layers without rotary embedding, whose queries are scaled by their place from token 64 on.
LLAMA4 = {
    "model_type": "llama4_text",
    "floor_scale": 64,
    "no_rope_layers": [1, 0, 1, 0],
    "num_local_experts": 2,
}
LLAMA4 |= {"intermediate_size_mlp": 64, "head_dim": 8, "initializer_range": 0.1}
DOCUMENTS = {"document_mask": True, "packing": "best_fit"}
CASES: list[tuple[Change, dict[str, int], dict[str, Any], dict[str, Any], str]] = [
    (scaled_by_the_place_in_the_tensor, {"cp": 2}, {}, {}, "fails the probe of real size on"),
    (
        scaled_by_the_place_in_the_tensor,
        {},
        {},
        DOCUMENTS,
        "fails the probe of real size with documents kept apart",
    ),
    (scaled_by_the_place_in_the_tensor, {}, {}, {}, "losses to token 256 at its real width"),
    (nothing, {"cp": 2}, {}, DOCUMENTS, "losses to token 256 at its real width"),
    (
        smaller_if_wide_and_split,
        {"tp": 2},
        {"hidden_size": 192},
        {},
        "fails the probe of real size on",
    ),
    (nothing, {"tp": 2}, {"hidden_size": 192}, {}, "losses to token 256 at its real width"),
    (nothing, {"cp": 2}, LLAMA4, {}, "losses to token 256 at its real width"),
    (nothing, {}, LLAMA4, DOCUMENTS, "losses to token 256 at its real width"),
    (nothing, {"dp": 2, "dp_shard": 2}, {}, {}, "losses to token 256 at its real width"),
]


def _name(value: Any) -> str:
    if callable(value):
        return value.__name__
    return (
        "-".join(f"{key}={each}" for key, each in value.items()) or "plain"
        if isinstance(value, dict)
        else ""
    )


@pytest.mark.parametrize(("plant", "sizes", "model", "data", "said"), CASES, ids=_name)
def test_what_is_computed_otherwise_at_real_size(
    plant: Change, sizes: dict[str, int], model: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    num_ranks = max([1, *sizes.values()])
    assert said in run_ranks(_admitted, num_ranks, plant, sizes, model, data)[0]
