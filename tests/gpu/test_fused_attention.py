"""Attention without a mask in memory on a CUDA device: each kernel's gradients, and what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from threefold.model.context_parallel import attention_choice
from threefold.model.context_parallel.local_attention import (
    BatchMasks,
    DocumentLengths,
    Mask,
    attend,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device: its attention kernels are not run",
    ),
]


def _attended(
    queries: int, keys: int, kernel: str, dtype: torch.dtype, mask: Mask
) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 8, queries, 64), (2, 4, keys, 64), (2, 4, keys, 64))
    given = [torch.randn(*shape, generator=generator, device="cuda") for shape in shapes]
    query, key, value = (each.to(dtype).requires_grad_() for each in given)
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    with attention_choice.first(kernel):
        output, _ = attend(module, query, key, value, mask)
        output.float().square().sum().backward()
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return output.detach(), query.grad, key.grad, value.grad


@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (256, 1024)])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("cudnn", torch.bfloat16), ("", torch.bfloat16), ("", torch.float32)]
)
def test_causal_kernels_give_what_a_mask_gives(
    queries: int, keys: int, kernel: str, dtype: torch.dtype
) -> None:
    mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)[
        None, None
    ]
    found = _attended(queries, keys, kernel, dtype, None)
    expected = _attended(queries, keys, "", torch.float32, mask)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for each, other in zip(found, expected, strict=True):
        assert (each.float() - other).norm() <= bound * other.norm()


def test_a_chunk_of_a_long_row_holds_no_mask() -> None:
    queries, keys = 8192, 131072

    def peak(mask: Tensor | None) -> int:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        _attended(queries, keys, "flash", torch.bfloat16, mask)
        return torch.cuda.max_memory_allocated() - held

    # as much as attention over keys that are all seen, which has no mask; one would take 1 GiB
    everything = torch.ones(1, device="cuda", dtype=torch.bool)[None, None, None].expand(
        1, 1, queries, keys
    )
    assert peak(None) < peak(everything) + 2**29


def _documents(length: int, share: float) -> Tensor:
    """The numbers of documents of 2 rows, in the host's memory; the end of the second row is padding."""
    documents = (
        torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < share
    ).cumsum(1)
    documents[1, length - length // 5 :] = -1
    return documents


def _mask_of(documents: Tensor, kernel: str) -> Mask:
    device = torch.device("cuda")
    places = torch.arange(documents.shape[1], device=device)
    lengths = DocumentLengths.of(documents, device) if kernel == "varlen" else None
    masks = BatchMasks(
        places, places, documents.to(device), kernel, alone=True, chunks=None, lengths=lengths
    )
    return masks.mask(
        2, mask_function=causal_mask_function, device=device, q_length=len(places)
    )


@pytest.mark.parametrize(
    "share", [0.5, 0.01, 0.0], ids=["short documents", "long documents", "whole rows"]
)
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_documents_give_what_a_mask_in_memory_gives(kernel: str, share: float) -> None:
    documents = _documents(1000, share)
    found = _attended(1000, 1000, "", torch.bfloat16, _mask_of(documents, kernel))
    expected = _attended(1000, 1000, "", torch.float32, _mask_of(documents, "sdpa"))
    for each, other in zip(found, expected, strict=True):
        assert (each.float() - other).norm() <= 2e-2 * other.norm()


def test_documents_by_lengths_have_the_same_bits_if_that_is_asked_for() -> None:
    mask = _mask_of(_documents(1000, 0.01), "varlen")
    torch.use_deterministic_algorithms(True)
    try:
        first = _attended(1000, 1000, "", torch.bfloat16, mask)
        for _ in range(5):
            for each, other in zip(
                first, _attended(1000, 1000, "", torch.bfloat16, mask), strict=True
            ):
                assert torch.equal(each, other)
    finally:
        torch.use_deterministic_algorithms(False)


def test_documents_are_counted_without_waiting_for_the_device() -> None:
    documents = _documents(1000, 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        DocumentLengths.of(documents, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
