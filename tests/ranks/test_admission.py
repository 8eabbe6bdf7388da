"""Admission: a fault of each probe's kind, planted on two ranks, is refused by name; right models are admitted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ranks.spawn import run_ranks
from threefold.errors import ThreefoldError

pytestmark = pytest.mark.ranks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
# Norms of single heads, of whose gradient a tp rank knows a part.
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ADAPTED = {**LLAMA, "lora": {"r": 4, "dropout": 0.1, "target_modules": "all-linear"}}
ROUTED = {**MIXTRAL, "output_router_logits": True}
NARROW = {**LLAMA, "dtype": "bfloat16"}


def drop_the_mask() -> None:
    import torch

    from threefold.model.context_parallel.local_attention import BatchMasks

    def everything(masks: BatchMasks, batch_size: int, **kwargs: Any) -> Any:
        return torch.ones(1, 1, len(masks.queries), len(masks.keys), dtype=torch.bool)

    BatchMasks.mask = everything  # type: ignore[method-assign]


def forget_documents() -> None:
    import dataclasses

    from threefold.model.context_parallel.local_attention import BatchMasks

    mask = BatchMasks.mask

    def without(masks: BatchMasks, batch_size: int, **kwargs: Any) -> Any:
        return mask(dataclasses.replace(masks, documents=None), batch_size, **kwargs)

    BatchMasks.mask = without  # type: ignore[method-assign]


def shift_positions() -> None:
    from collections.abc import Iterator
    from contextlib import contextmanager

    from threefold.model.context_parallel.attention import ContextParallel

    batch = ContextParallel.batch

    @contextmanager
    def shifted(context: ContextParallel, *given: Any) -> Iterator[dict[str, Any]]:
        with batch(context, *given) as local:
            yield {**local, "position_ids": local["position_ids"] + context._rank}

    ContextParallel.batch = shifted  # type: ignore[method-assign]


def see_a_part_of_the_row() -> None:
    """Keys and values of other cp ranks are lost on the way."""
    import torch

    from threefold.model.context_parallel import attention

    def alone(key: Any, value: Any, group: Any) -> tuple[Any, ...]:
        whole = gather(key, value, group)
        size, rank, length = (
            torch.distributed.get_world_size(group),
            torch.distributed.get_rank(group),
            key.shape[2],
        )
        own = torch.zeros(size * length, 1)
        own[attention.local_positions(size * length, cp_size=size, cp_rank=rank)] = 1
        return tuple(each * own for each in whole)

    gather = attention.gather_sequence
    attention.gather_sequence = alone  # type: ignore[assignment]


def sum_twice() -> None:
    from threefold.training.gradients import Gradients

    once = Gradients._sum_partial

    def twice(step: Gradients, gradients: Any) -> None:
        once(step, gradients)
        once(step, gradients)

    Gradients._sum_partial = twice  # type: ignore[method-assign]


def sum_never() -> None:
    from threefold.training.gradients import Gradients

    Gradients._sum_partial = lambda step, gradients: None  # type: ignore[method-assign]


def reduce_never() -> None:
    from contextlib import contextmanager

    from threefold.model import data_parallel
    from threefold.training import step

    last = data_parallel.last_backward
    step.last_backward = contextmanager(  # type: ignore[assignment]
        lambda model, _, **settings: (yield from _enter(last(model, False, unsharded=True)))
    )


def _enter(context: Any) -> Any:
    with context:
        yield


def untie_the_head() -> None:
    import torch

    from threefold.model import weight_loading

    fill = weight_loading.fill

    def untied(model: Any, *args: Any, **kwargs: Any) -> None:
        fill(model, *args, **kwargs)
        model.lm_head._parameters["weight"] = torch.nn.Parameter(
            model.lm_head.weight.detach().clone()
        )

    weight_loading.fill = untied  # type: ignore[assignment]


def leak_rows() -> None:
    from threefold.model.context_parallel import attention

    attend = attention.attend

    def leaking(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = attend(module, query, *args, **kwargs)
        return output + 0.05 * output.flip(0), weights

    attention.attend = leaking  # type: ignore[assignment]


def scale_the_head() -> None:
    from threefold.model import head

    logits = head.logits_of
    head.logits_of = lambda *args: logits(*args) * 1.01  # type: ignore[assignment]


def count_padding() -> None:
    from threefold.training.loss import RouterLoss

    picks = RouterLoss.picks

    def more(self: RouterLoss, *args: Any) -> Any:
        return picks(self, *args) * 1.01

    RouterLoss.picks = more  # type: ignore[method-assign]


def scale_gradients_of_adapters() -> None:
    """Over tp, where both of an adapter's ranks are wrong alike: their copies stay equal."""
    from threefold.model import lora

    plain = lora._product

    def product(module: Any, x: Any) -> Any:
        output = plain(module, x)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1.1)
        return output

    lora._product = product  # type: ignore[assignment]


def scale_gradients_of_longer_rows() -> None:
    """Over tp, and beyond 40 tokens: the forward is right."""
    from torch.distributed.tensor import DTensor
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def forward(module: Any, x: Any) -> Any:
        output = plain(module, x)
        if (
            isinstance(module.down_proj.weight, DTensor)
            and x.shape[1] > 40
            and output.requires_grad
        ):
            output.register_hook(lambda gradient: gradient * 1.1)
        return output

    LlamaMLP.forward = forward  # type: ignore[method-assign]


def halve_gradients_of_keys_in_bfloat16() -> None:
    """A kernel whose forward is right, and its backward in float32."""
    import torch
    from torch.nn import functional

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, key: Any) -> Any:
            return key.view_as(key)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] / 2

    own = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        return own(
            query, Halved.apply(key) if key.dtype == torch.bfloat16 else key, *rest, **options
        )

    functional.scaled_dot_product_attention = attention


def _admit(mesh: Any, model: dict[str, Any], data: dict[str, Any], admission: str) -> str:
    from threefold.check.admit import admit
    from threefold.config.loading import validate
    from threefold.errors import ConfigError
    from threefold.model import load

    asked = {name: value for name, value in model.items() if name not in ("lora", "dtype")}
    values = {
        "config": asked,
        "admission": admission,
        "lora": model.get("lora", {}),
        "dtype": model.get("dtype", "auto"),
    }
    config = validate({"model": values, "data": {"seq_len": 32, **data}})
    try:
        return ": ".join(admit(config, load.read_config(config.model), mesh))
    except ConfigError as error:
        return str(error)


def _admit_with(fault: Callable[[], None], sizes: dict[str, int], *asked: Any) -> str:
    import threefold

    fault()
    mesh = threefold.init_mesh(**sizes, device="cpu")
    return _admit(mesh, *asked, "full")


def _admit_twice(
    folder: str, sizes: dict[str, int], data: dict[str, Any]
) -> list[tuple[str, str]]:
    import threefold

    os.environ["XDG_CACHE_HOME"] = folder
    mesh = threefold.init_mesh(**sizes, device="cpu")
    models = (LLAMA, TIED, MIXTRAL, ROUTED, ADAPTED, NARROW)
    said = [
        (_admit(mesh, model, data, "auto"), _admit(mesh, model, data, "auto"))
        for model in models
    ]
    mesh.close()
    return said


@pytest.mark.parametrize(
    ("fault", "sizes", "model", "data", "probe", "fix"),
    [
        (drop_the_mask, {"tp": 2}, LLAMA, {}, "causality", "use another architecture"),
        (drop_the_mask, {"cp": 2}, LLAMA, {}, "causality", "use another architecture"),
        (
            forget_documents,
            {"dp": 2},
            LLAMA,
            {"document_mask": True},
            "documents",
            "--data.document_mask false",
        ),
        (shift_positions, {"cp": 2}, LLAMA, {}, "loss", "--mesh.cp 1"),
        (see_a_part_of_the_row, {"cp": 2}, LLAMA, {}, "context", "--mesh.cp 1"),
        (sum_twice, {"tp": 2}, QWEN3, {}, "gradients", "--mesh.tp 1"),
        (sum_never, {"tp": 2}, QWEN3, {}, "replicas", "--mesh.tp 1"),
        (scale_gradients_of_longer_rows, {"tp": 2}, LLAMA, {}, "gradients", "--mesh.tp 1"),
        (scale_gradients_of_adapters, {"tp": 2}, ADAPTED, {}, "gradients", "--mesh.tp 1"),
        (sum_never, {"tp": 2}, ADAPTED, {}, "replicas", "--mesh.tp 1"),
        (reduce_never, {"dp": 2}, LLAMA, {}, "gradients", "--mesh.dp 1"),
        (untie_the_head, {"dp": 2}, TIED, {}, "gradients", "--model.admission off"),
        (leak_rows, {"dp": 2}, LLAMA, {}, "composition", "--model.admission off"),
        (scale_the_head, {"dp": 2}, LLAMA, {}, "head", "--model.admission off"),
        (count_padding, {"dp": 2}, ROUTED, {}, "routers' loss", "--model.admission off"),
        (
            halve_gradients_of_keys_in_bfloat16,
            {"dp": 2},
            NARROW,
            {},
            "kernels",
            "--model.dtype float32",
        ),
        (
            halve_gradients_of_keys_in_bfloat16,
            {"tp": 2},
            NARROW,
            {},
            "kernels",
            "--model.dtype float32",
        ),
    ],
)
def test_a_planted_fault_is_refused_by_name(
    fault: Callable[[], None],
    sizes: dict[str, int],
    model: dict[str, Any],
    data: dict[str, Any],
    probe: str,
    fix: str,
) -> None:
    found = run_ranks(_admit_with, 2, fault, sizes, model, data)
    assert found[0] == found[1]
    assert f"{model['model_type']!r} fails the probe of {probe} " in found[0]
    assert f"fix: {fix}" in found[0]
    assert ("rows of 60 tokens" in found[0]) == (fault is scale_gradients_of_longer_rows)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "dp_shard": 2}, {"cp": 2}, {"tp": 2}])
@pytest.mark.parametrize(
    "data", [{}, {"document_mask": True, "packing": "best_fit"}, {"packing": "none"}]
)
def test_right_models_are_admitted_once(
    sizes: dict[str, int], data: dict[str, Any], tmp_path: Any
) -> None:
    for first, again in run_ranks(_admit_twice, 2, str(tmp_path), sizes, data)[0]:
        assert " probes hold: " in first
        assert not first.endswith("; found before")
        assert again.endswith("; found before")


def _admit_after(
    fault: Callable[[], None], folder: str, on: tuple[int, ...]
) -> tuple[str, str]:
    import threefold

    os.environ["XDG_CACHE_HOME"] = folder
    mesh = threefold.init_mesh(dp=2, device="cpu")
    before = _admit(mesh, LLAMA, {}, "auto")
    if mesh.rank in on:
        fault()
    return before, _admit(mesh, LLAMA, {}, "auto")


def see_the_next_token() -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    LlamaMLP.forward = lambda self, x: own(self, x) + torch.roll(x, -1, 1)  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [see_the_next_token, drop_the_mask])
def test_a_kept_pass_admits_no_patched_class(fault: Callable[[], None], tmp_path: Any) -> None:
    before, after = run_ranks(_admit_after, 2, fault, str(tmp_path), (0, 1))[0]
    assert " probes hold: " in before
    assert "fails the probe of causality" in after


def test_a_class_that_is_patched_on_one_rank_is_refused(tmp_path: Any) -> None:
    after = [
        after
        for _, after in run_ranks(_admit_after, 2, see_the_next_token, str(tmp_path), (1,))
    ]
    assert after[0] == after[1]
    assert after[0].startswith("the code of the model on rank 1 differs from rank 0's")


def _narrow(model_type: str) -> str:
    from architectures import config_of
    from threefold.check.admit import admit
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(device="cpu")
    config = validate(
        {
            "model": {
                "config": {"model_type": model_type},
                "dtype": "bfloat16",
                "admission": "full",
            }
        }
    )
    try:
        return ": ".join(admit(config, config_of(model_type), mesh))
    except ThreefoldError as error:
        return str(error)
    finally:
        mesh.close()


def test_what_cannot_be_computed_in_bfloat16_is_refused_before_it_is_trained() -> None:
    """transformers itself multiplies bfloat16 by float32 in xlstm."""
    assert run_ranks(_narrow, 1, "xlstm")[0] == (
        "'xlstm' cannot be computed in bfloat16, on any mesh: RuntimeError: expected m1 and m2 to have the same dtype, "
        "but got: float != c10::BFloat16\n"
        "  expected: an architecture whose step works there, with the model's own forward to compare it with\n"
        "  fix: --model.dtype float32"
    )
    assert run_ranks(_narrow, 1, "llama")[0].startswith("admission: 10 probes hold: ")
