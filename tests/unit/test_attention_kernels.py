"""Which fused kernel comes first, and attention over the halves of a row without a mask."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from threefold.model.context_parallel import attention_choice
from threefold.model.context_parallel.local_attention import (
    BatchMasks,
    DocumentLengths,
    attend,
    lower_right,
)
from threefold.model.context_parallel.positions import local_positions
from threefold.plan.families import FAMILIES

HOPPER, BLACKWELL, AMPERE, TURING = (9, 0), (10, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "halved", "expected"),
    [
        (HOPPER, "bfloat16", 128, False, "cudnn"),
        (HOPPER, "bfloat16", 64, False, "cudnn"),
        (HOPPER, "bfloat16", 128, True, "flash"),  # cuDNN's order begins at the first key
        (HOPPER, "bfloat16", 192, False, "flash"),
        (HOPPER, "bfloat16", 100, False, "flash"),
        (HOPPER, "bfloat16", 512, False, "efficient"),
        (HOPPER, "float32", 128, False, "efficient"),
        (BLACKWELL, "bfloat16", 128, False, "flash"),
        (AMPERE, "bfloat16", 128, False, "flash"),
        (TURING, "bfloat16", 128, False, "efficient"),
    ],
)
def test_kernel_is_chosen_with_a_reason(
    capability: tuple[int, int], dtype: str, head_dim: int, halved: bool, expected: str
) -> None:
    kernel, why = attention_choice.choose(
        capability, dtype=dtype, head_dim=head_dim, halved=halved
    )
    assert kernel == expected
    assert why
    same = attention_choice.choose(
        capability, dtype=dtype, head_dim=head_dim, halved=halved, deterministic=True
    )
    assert same[0] == ("flash" if expected == "cudnn" else expected)


def test_order_of_kernels_is_changed_for_cudnn_alone_and_given_back() -> None:
    before = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    with attention_choice.first("cudnn"):
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value  # type: ignore[attr-defined]
    for kernel in ("flash", "efficient", ""):
        with attention_choice.first(kernel):
            assert torch._C._get_sdp_priority_order() == before  # type: ignore[attr-defined]
    assert torch._C._get_sdp_priority_order() == before  # type: ignore[attr-defined]


def test_head_size_is_that_of_queries_and_keys() -> None:
    llama: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
    assert attention_choice.head_size(AutoConfig.for_model("llama", **llama)) == 16
    assert attention_choice.head_size(AutoConfig.for_model("qwen3", **llama, head_dim=32)) == 32
    latent = AutoConfig.for_model("deepseek_v3", qk_nope_head_dim=128, qk_rope_head_dim=64)
    assert attention_choice.head_size(latent) == 192


def _rows(heads: int, sequence: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        2, heads, sequence, 8, generator=generator, dtype=torch.float64
    ).requires_grad_()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "settings", [{}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0])}], ids=str
)
@pytest.mark.parametrize("window", [None, 5])
def test_halves_give_what_one_process_computes(
    rank: int, settings: dict[str, Any], window: int | None
) -> None:
    sequence, ranks = 16, 2
    function = (
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    )
    own = local_positions(sequence, cp_size=ranks, cp_rank=rank)
    keys = torch.arange(sequence)
    masks = BatchMasks(
        own, keys, None, "sdpa", alone=False, chunks=(rank, 2 * ranks - 1 - rank)
    )
    halves: Any = masks.mask(2, mask_function=function, q_length=sequence // ranks)
    if window is None:
        assert [mask for _, mask in halves] == [None, None]
    # the keys of other ranks' later tokens are not even read
    assert [seen.stop for seen, _ in halves] == [(rank + 1) * 4, (4 - rank) * 4]

    def run(queries: Tensor, mask: Any) -> tuple[Tensor, ...]:
        query, key, value = (
            _rows(4, sequence, seed=0),
            _rows(2, sequence, seed=1),
            _rows(2, sequence, seed=2),
        )
        module = nn.Module()
        module.num_key_value_groups = 2  # type: ignore[assignment]
        output, _ = attend(
            module, query[:, :, queries], key, value, mask, scaling=0.3, **settings
        )
        output.square().sum().backward()
        assert query.grad is not None and key.grad is not None and value.grad is not None
        return output, query.grad[:, :, queries], key.grad, value.grad

    rows = torch.arange(sequence)
    whole = function(0, 0, rows[:, None], rows[None])[None, None].expand(2, 1, -1, -1)
    for found, expected in zip(run(own, halves), run(own, whole[:, :, own]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_kernels_are_told_where_the_last_query_stands() -> None:
    query, key, value = _rows(4, 8, seed=0), _rows(4, 16, seed=1), _rows(4, 16, seed=2)
    told = lower_right(8, 16)
    assert told.numel() < 8  # no mask
    # without a kernel for it, as on a CPU, torch makes the mask
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=told)
    mask = torch.ones(8, 16, dtype=torch.bool).tril(8)
    torch.testing.assert_close(
        found, F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    )


def test_plain_causal_rows_whose_heads_are_shared_have_no_mask() -> None:
    rows = torch.arange(16)
    masks = BatchMasks(rows, rows, None, "sdpa", alone=False, chunks=None)
    assert masks.mask(2, mask_function=causal_mask_function, q_length=8) is None
    documents = torch.zeros(2, 16, dtype=torch.int64)
    with_documents = BatchMasks(rows, rows, documents, "sdpa", alone=False, chunks=None)
    assert with_documents.mask(2, mask_function=causal_mask_function, q_length=8) is not None


@pytest.mark.parametrize(
    ("documents", "begins", "beyond"),
    [
        ([[0, 0, 1, 1, 1, 2]], [0, 2, 5, 6], 4),
        ([[7, 7, 7], [7, 7, 7]], [0, 3, 6], 4),  # rows are apart, whatever their numbers
        ([[0, 1, -1, -1], [0, 0, 0, 0]], [0, 1, 2, 4, 8], 5),  # padding is a document
        ([[0, 1, 0, 0]], [0, 1, 2, 4], 3),  # a number that returns is another document
        ([[3]], [0, 1], 2),
    ],
)
def test_lengths_of_documents(
    documents: list[list[int]], begins: list[int], beyond: int
) -> None:
    found = DocumentLengths.of(torch.tensor(documents), torch.device("cpu"))
    assert found.begins.tolist() == begins and found.begins.dtype == torch.int32
    assert found.beyond == beyond


def test_lengths_are_the_mask_where_it_is_plain_causal_and_known() -> None:
    rows, documents = torch.arange(16), torch.arange(16)[None] // 5
    lengths = DocumentLengths.of(documents, torch.device("cpu"))

    def mask(function: Any, known: DocumentLengths | None) -> Any:
        masks = BatchMasks(
            rows, rows, documents, "varlen", alone=True, chunks=None, lengths=known
        )
        return masks.mask(1, mask_function=function, q_length=16)

    assert mask(causal_mask_function, lengths) is lengths
    # Documents that are on the device already were not counted.
    assert isinstance(mask(causal_mask_function, None), BlockMask)
    assert isinstance(mask(sliding_window_causal_mask_function(4), lengths), BlockMask)


@pytest.mark.parametrize(
    ("model_type", "sizes", "why"),
    [
        ("llama", {}, ""),
        ("qwen3", {"head_dim": 128}, ""),
        ("gemma3_text", {"head_dim": 256}, ""),
        (
            "gemma2",
            {},
            "its layers ask for more than plain attention, or are not known by name",
        ),
        (
            "gpt_oss",
            {},
            "its layers ask for more than plain attention, or are not known by name",
        ),
        (
            "deepseek_v3",
            {},
            "its layers ask for more than plain attention, or are not known by name",
        ),
        ("llama", {"head_dim": 100}, "flash does not serve heads of 100"),
        ("llama", {"head_dim": 264}, "flash does not serve heads of 264"),
    ],
)
def test_models_of_which_lengths_serve_all(
    model_type: str, sizes: dict[str, int], why: str
) -> None:
    assert attention_choice.unserved(AutoConfig.for_model(model_type, **sizes)) == why


def test_known_families_ask_for_nothing_that_lengths_leave_out() -> None:
    """By the source of their models: no cap, no sinks, no bias of places, keys and values of one size."""
    for model_type, family in FAMILIES.items():
        model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]
        source = inspect.getsource(sys.modules[model.__module__])
        more = re.findall(r"\b(?:softcap=|s_aux=|position_bias=|v_head_dim\b)", source)
        assert family.written_out or not more, (model_type, more)
        assert not family.written_out or attention_choice.unserved(
            AutoConfig.for_model(model_type)
        ), model_type
