"""Causal documents by their lengths give what masks in memory give; torch's kernel of it is one written out here.

torch's `varlen_attn` has no kernel for a CPU. Its operator is given one, so that all of torch around it is the real
one: what it is asked for, how a window is told, its autograd and its shapes in graphs. Nothing here ran on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.reference import TINY_LLAMA
from ranks.spawn import run_ranks
from threefold.check.compare import PROBE_GRADIENT, Comparison, compare_tensors
from threefold.config.loading import validate
from threefold.model import load

pytestmark = pytest.mark.ranks

ROWS, LENGTH, MICRO_BATCHES = 3, 32, 2
# Its scores are scaled by a number of its own.
GRANITE = {**TINY_LLAMA, "model_type": "granite", "attention_multiplier": 0.7}
LAYERS_OF_TWO_KINDS = {
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3 = {**TINY_LLAMA, "model_type": "gemma3_text", **LAYERS_OF_TWO_KINDS}
MODELS = {"llama": TINY_LLAMA, "granite": GRANITE, "gemma3": GEMMA3}


def _weights(
    query: Tensor, key: Tensor, begins: Tensor, scale: float | None
) -> Iterator[tuple[tuple[slice, int], tuple[slice, int], Tensor, float]]:
    """Of each document and head: where its queries are, where its keys are, its attention weights, the scale."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for first, end in pairwise(begins.tolist()):
        for head in range(query.shape[1]):
            own, other = (
                (slice(first, end), head),
                (slice(first, end), head // (query.shape[1] // key.shape[1])),
            )
            scores = query[own].float() @ key[other].float().T * scale
            hidden = torch.ones_like(scores).triu(1).bool()
            yield own, other, scores.masked_fill(hidden, -torch.inf).softmax(-1), scale


def _give_torch_a_kernel(calls: list[tuple[int, ...]], fault: str) -> None:
    """Calls note the numbers of documents and of heads; with a fault the kernel has it."""
    from torch.nn.attention import varlen

    def forward(
        query: Tensor, key: Tensor, value: Tensor, begins: Tensor, keys: Tensor, *others: Any
    ) -> Any:
        most, _, is_causal, scale, window = others[:5]
        assert (
            is_causal
            and list(window) == [-1, 0]
            and torch.equal(begins, keys)
            and begins.dtype == torch.int32
        )
        assert (
            begins[0] == 0
            and begins[-1] == len(query) == len(key)
            and 0 < begins.diff().max() < most <= 2 * LENGTH
        )
        calls.append((len(begins) - 1, query.shape[1], key.shape[1]))
        if fault == "heads in another order":
            key, value = (
                each.repeat(1, query.shape[1] // each.shape[1], 1) for each in (key, value)
            )
        output = torch.full_like(query, torch.nan)
        for own, other, weights, _ in _weights(
            query, key, begins, None if fault == "no scale" else scale
        ):
            output[own] = (weights @ value[other].float()).to(output.dtype)
        return (
            output,
            torch.zeros(query.shape[1], len(query)),
            torch.zeros(2, dtype=torch.uint64),
        )

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        _, _, begins, _, _, _, _, _, scale = others[:9]
        dtype = query.dtype
        grad, query, key, value = (each.float() for each in (grad, query, key, value))
        gradients = [torch.zeros_like(each) for each in (query, key, value)]
        for own, other, weights, scaled_by in _weights(query, key, begins, scale):
            of_weights = grad[own] @ value[other].T
            of_scores = (
                weights
                * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
                * scaled_by
            )
            gradients[0][own] += of_scores @ key[other]
            narrow = (
                0.5 if fault == "half the keys' gradient" and dtype == torch.bfloat16 else 1.0
            )
            gradients[1][other] += of_scores.T @ query[own] * narrow
            gradients[2][other] += weights.T @ grad[own]
        return tuple(each.to(dtype) for each in gradients)

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


def _plant(fault: str) -> None:
    from threefold.model.context_parallel.local_attention import DocumentLengths

    of = DocumentLengths.of.__func__

    def wrong(cls: Any, documents: Tensor, device: Any) -> Any:
        found = of(cls, documents, device)
        begins = found.begins.clone()
        if fault == "one late":
            begins[1:-1] += 1
        if fault == "rows together":
            begins = begins[
                (begins % LENGTH != 0) | (begins == 0) | (begins == documents.numel())
            ]
        return found._replace(begins=begins, beyond=LENGTH + 1)

    DocumentLengths.of = classmethod(wrong)


def _batches() -> list[dict[str, Tensor]]:
    """Micro-batches with documents of random lengths, of one token too; two of the rows end in padding."""
    generator, batches = torch.Generator().manual_seed(11), []
    for _ in range(MICRO_BATCHES):
        documents = (torch.rand(ROWS, LENGTH, generator=generator) < 0.2).cumsum(1)
        used = torch.tensor([LENGTH, LENGTH - 5, LENGTH - 11])[:ROWS, None]
        documents[torch.arange(LENGTH) >= used] = -1
        tokens = torch.randint(67, (ROWS, LENGTH), generator=generator)
        batches.append(
            {"input_ids": tokens, "labels": tokens.roll(-1, 1), "document_ids": documents}
        )
    return batches


def _results(
    kernel: str, model: str, mesh_of: dict[str, Any], settings: dict[str, Any], fault: str = ""
) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Hidden states and gradients of two micro-batches, each by its name, and the calls of torch's operator."""
    from threefold.mesh.mesh import init_mesh
    from threefold.model.build import build
    from threefold.plan import choices

    calls: list[tuple[int, ...]] = []
    _give_torch_a_kernel(calls, fault)
    if fault in ("one late", "rows together"):
        _plant(fault)
    choices.attention = lambda *given, **named: choices.Decision(kernel, "a test's")  # type: ignore[assignment]
    mesh = init_mesh(
        device="cpu", **{name: size for name, size in mesh_of.items() if name != "cp_method"}
    )
    method = {"cp_method": mesh_of.get("cp_method", "auto")}
    asked = {
        "model": {"config": MODELS[model]},
        "mesh": method,
        "data": {"seq_len": LENGTH},
        "train": settings,
    }
    config = validate(asked)
    built, results = build(config, load.read_config(config.model), mesh), {}
    assert (f"attention: {kernel}", "a test's") in built.choices or kernel == "sdpa"
    # A CPU has no backward of flex_attention, which its windows take.
    trains = model != "gemma3"
    for place, rows in enumerate(_batches()):
        with torch.set_grad_enabled(trains), built.computing(rows) as local:
            hidden = built.outputs(local, "hidden_states").values
            results[f"hidden states {place}"] = hidden.detach()
            if trains:
                (
                    hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden).sin()
                ).sum().backward()
    for name, parameter in built.module.named_parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            results[name] = grad.to_local() if hasattr(grad, "to_local") else grad
    return results, calls


def _compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Comparison:
    assert found.keys() == expected.keys()
    return Comparison(compare_tensors(PROBE_GRADIENT, found, expected))


MESHES: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp 2": {"tp": 2},
    "cp 2 by heads": {"cp": 2, "cp_method": "ulysses"},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["llama", "granite"])
def test_lengths_give_the_gradients_of_masks(model: str, mesh: str) -> None:
    ranks = 1 if mesh == "one process" else 2
    documents = [
        sum(int((row.diff() != 0).sum()) + 1 for row in rows["document_ids"])
        for rows in _batches()
    ]
    by_masks = run_ranks(_results, ranks, "sdpa", model, MESHES[mesh], {})
    by_lengths = run_ranks(_results, ranks, "varlen", model, MESHES[mesh], {})
    for (found, calls), (expected, none) in zip(by_lengths, by_masks, strict=True):
        assert not none and calls == [
            (count, 4 // ranks, 2 // ranks) for count in documents for _ in range(2)
        ]
        comparison = _compared(found, expected)
        assert comparison.holds, comparison.worst()


def test_layers_with_windows_keep_blocks_beside_it() -> None:
    (found, calls), (expected, _) = (
        run_ranks(_results, 1, kernel, "gemma3", {}, {})[0] for kernel in ("varlen", "sdpa")
    )
    assert len(calls) == MICRO_BATCHES  # of its two layers the one without a window
    assert _compared(found, expected).holds


def test_what_is_expensive_is_kept_and_all_else_computed_again() -> None:
    expected, once = run_ranks(_results, 1, "varlen", "llama", {}, {})[0]
    for kind, times in (("selective", 1), ("full", 2)):
        found, calls = run_ranks(
            _results, 1, "varlen", "llama", {}, {"activation_checkpointing": kind}
        )[0]
        assert len(calls) == times * len(once), kind
        assert _compared(found, expected).holds, kind


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("one late", "llama"),
        ("rows together", "llama"),
        ("heads in another order", "llama"),
        ("no scale", "granite"),
    ],
)
def test_planted_faults_are_seen(fault: str, model: str) -> None:
    expected, _ = run_ranks(_results, 1, "sdpa", model, {}, {})[0]
    found, calls = run_ranks(_results, 1, "varlen", model, {}, {}, fault)[0]
    assert calls and not _compared(found, expected).holds


def _admitted(fault: str) -> tuple[str, int]:
    """What admission says of a run in bfloat16 whose documents are computed by their lengths; calls of the operator."""
    from threefold.check.admit import admit
    from threefold.errors import ConfigError
    from threefold.mesh.mesh import init_mesh
    from threefold.plan import choices

    calls: list[tuple[int, ...]] = []
    _give_torch_a_kernel(calls, fault)
    kernels = {"auto": "varlen", "sdpa": "sdpa"}
    choices.attention = lambda asked, *own, **named: choices.Decision(
        kernels[asked], "a test's"
    )  # type: ignore[assignment]
    mesh = init_mesh(device="cpu")
    config = validate(
        {
            "model": {"config": TINY_LLAMA, "dtype": "bfloat16", "admission": "full"},
            "data": {"seq_len": LENGTH, "document_mask": True},
        }
    )
    try:
        return ": ".join(admit(config, load.read_config(config.model), mesh)), len(calls)
    except ConfigError as error:
        return str(error), len(calls)


def test_a_kernel_whose_backward_is_wrong_in_bfloat16_is_refused_and_what_holds_is_named() -> (
    None
):
    said, calls = run_ranks(_admitted, 1, "")[0]
    assert said.startswith("admission: 11 probes hold: ") and calls
    said, _ = run_ranks(_admitted, 1, "half the keys' gradient")[0]
    assert said.startswith(
        "'llama' fails the probe of kernels in bfloat16, on any mesh: its gradients in bfloat16 "
    )
    assert "k_proj.weight" in said and said.endswith(
        "fix: --model.attention sdpa --train.compile false"
    )


def _graphs(micro_batches: int) -> tuple[list[int], list[int]]:
    """After each of some micro-batches, how often a layer was compiled again; the numbers of documents."""
    from threefold.mesh.mesh import init_mesh
    from threefold.model.build import build
    from threefold.model.compiled import Recompiled
    from threefold.plan import choices

    calls: list[tuple[int, ...]] = []
    _give_torch_a_kernel(calls, "")
    choices.attention = lambda *given, **named: choices.Decision("varlen", "a test's")  # type: ignore[assignment]
    asked = {
        "model": {"config": TINY_LLAMA},
        "data": {"seq_len": LENGTH},
        "train": {"compile": True},
    }
    config = validate(asked)
    model = build(config, load.read_config(config.model), init_mesh(device="cpu"))
    again, recompiled = [], Recompiled(print)
    for seed in range(micro_batches):
        generator = torch.Generator().manual_seed(seed)
        rows = {"input_ids": torch.randint(67, (ROWS, LENGTH), generator=generator)}
        rows["document_ids"] = (
            torch.rand(ROWS, LENGTH, generator=generator) < 0.1 * (seed + 1)
        ).cumsum(1)
        with model.computing(rows) as local:
            model.outputs(local, "hidden_states").values.square().mean().backward()
        again.append(recompiled.look())
    return again, [count for count, *_ in calls[::2]]


def test_compiled_layers_take_any_number_of_documents() -> None:
    """As of rows of another length: compiled again for the second number, and then for no other."""
    again, documents = run_ranks(_graphs, 1, 6)[0]
    assert len(set(documents)) == 6, documents
    assert again[-1] == again[1] <= 1, again
