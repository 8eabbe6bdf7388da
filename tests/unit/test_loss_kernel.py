"""The kernels of the loss against its operations, by Triton's interpreter, and their code for a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from threefold.check.compare import Bound, Comparison, compare_tensors
from threefold.model import head
from threefold.training.loss import TokenLoss

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (the extra `triton`, 198 MB)",
)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
MODULES = ("threefold.optim.fused_kernel", "threefold.training.loss_kernel")
# Tokens, entries of the vocabulary: one, parts of a block, whole blocks, and what is left of them.
SHAPES = [
    *((tokens, width) for tokens in (1, 2, 7) for width in (1, 2, 31, 64, 127, 257)),
    *((3, width) for width in (1000, 1024, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 12289)),
    *((5, width) for width in (3, 100, 999, 2049, 6000)),
    *((tokens, 61) for tokens in (4, 9, 16, 33, 64)),
    *((0, 61), (1, 20000)),
]
LOSSES = {
    "plain": TokenLoss(),
    "z": TokenLoss(z_loss=0.3),
    "smooth": TokenLoss(label_smoothing=0.1),
    "both": TokenLoss(label_smoothing=0.2, z_loss=1e-2),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels' module, which Triton's interpreter computes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _forget()
    module = importlib.import_module(MODULES[1])
    # Which the interpreter finds at once, not number by number.
    monkeypatch.setattr(
        "triton.language.standard._elementwise_max", module.larger, raising=False
    )
    monkeypatch.setattr("triton.language.standard._sum_combine", module._sum, raising=False)
    # What a kernel leaves out would else be what another left there.
    monkeypatch.setattr(
        torch,
        "empty_like",
        lambda like, **settings: torch.full_like(like, torch.nan, **settings),
    )
    yield module
    _forget()


def _forget() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)


def drawn(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of which some are large, and labels of which some do not count."""
    logits = torch.randn(tokens, width) * 4
    labels = torch.randint(width, (tokens,))
    labels[1::3] = -100
    return logits.to(dtype), labels


def agree(
    found: TokenLoss, logits: Tensor, labels: Tensor, *, dtype: torch.dtype = FLOAT32
) -> None:
    """By kernels, sums and gradients are those of operations."""
    *expected, gradient_of = replace(found, fused=False).measure(logits, labels)
    *own, own_gradient_of = replace(found, fused=True).measure(logits.clone(), labels)
    for one, other in zip(own, expected, strict=True):
        assert one.dtype == FLOAT32
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, equal_nan=True)
    counted = (labels != -100)[:, None]
    gradients = [own_gradient_of(dtype) * counted, gradient_of(dtype).to(dtype) * counted]
    assert gradients[0].dtype == dtype
    # Of bfloat16, a number between two may be rounded to either.
    bound = {"rtol": 4e-6, "atol": 1e-7} if dtype == FLOAT32 else {"rtol": 2**-7, "atol": 1e-7}
    torch.testing.assert_close(*gradients, **bound, equal_nan=True)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_have_the_sums_and_gradients_of_operations(
    kernel: Any, name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    assert len(SHAPES) == 40
    for shape in SHAPES:
        logits, labels = drawn(*shape, dtype)
        agree(LOSSES[name], logits, labels)
        agree(LOSSES[name], logits, labels, dtype=dtype)


@needs_triton
def test_what_is_not_a_number_is_not_one_in_the_loss_and_what_is_left_out_of_a_vocabulary_stays_out(
    kernel: Any,
) -> None:
    torch.manual_seed(1)
    for place, value in ((0, torch.nan), (4999, torch.nan), (17, torch.inf)):
        logits, labels = drawn(3, 5000, FLOAT32)
        logits[0, place] = value
        assert LOSSES["plain"].measure(logits, labels)[0][0].isnan()
        agree(LOSSES["plain"], logits, labels)
        loss = replace(LOSSES["plain"], fused=True).measure(logits, labels)[0]
        assert loss[0].isnan() and loss[2].isfinite()
    # Whole blocks of a row may be masked, the first too.
    logits, labels = drawn(4, 9000, FLOAT32)
    logits[:, :4200] = -torch.inf
    labels[labels >= 0] = 8999
    agree(LOSSES["z"], logits, labels)
    gradient = (
        replace(LOSSES["z"], fused=True).measure(logits, labels)[2](FLOAT32)
        * (labels != -100)[:, None]
    )
    assert torch.equal(gradient[:, :4200], torch.zeros(4, 4200))


@needs_triton
def test_bits_of_a_token_do_not_depend_on_the_tokens_beside_it(kernel: Any) -> None:
    torch.manual_seed(2)
    logits, labels = drawn(12, 4500, BFLOAT16)
    loss = replace(LOSSES["both"], fused=True)
    *whole, of_whole = loss.measure(logits, labels)
    *part, of_part = loss.measure(logits[5:8], labels[5:8])
    assert all(torch.equal(one[5:8], other) for one, other in zip(whole, part, strict=True))
    assert torch.equal(of_whole(BFLOAT16)[5:8], of_part(BFLOAT16))


class Parts:
    """In the place of the ranks of a tp axis: what each would send is kept, and summed when all have been asked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, parts: list[tuple[Tensor, int]], labels: Tensor
    ) -> None:
        self._sent: list[list[Tensor]] = [[], []]
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self._calls = 0
        self.known: list[Tensor] = []
        for number in range(2):  # the largest of all first, then the sums
            self._sent[number].clear()
            for logits, start in parts:
                self._calls = 0
                self._collecting = number
                try:
                    self.loss(start).measure(logits, labels)
                except StopIteration:
                    continue
            stacked = torch.stack(self._sent[number])
            self.known.append(stacked.amax(0) if number == 0 else stacked.sum(0))
        self._collecting = 2

    @staticmethod
    def loss(start: int, **settings: Any) -> TokenLoss:
        group: Any = object()
        return TokenLoss(
            group, start, vocabulary=61, label_smoothing=0.2, z_loss=0.1, **settings
        )

    def _all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> None:
        number, self._calls = self._calls % 2, self._calls + 1
        if number == self._collecting:
            self._sent[number].append(tensor.clone())
            raise StopIteration
        tensor.copy_(self.known[number])


@needs_triton
def test_parts_of_a_vocabulary_are_the_whole_of_it(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part is shorter, and one is empty."""
    torch.manual_seed(3)
    logits, labels = drawn(9, 61, FLOAT32)
    places = [(0, 24), (24, 48), (48, 61), (61, 61)]
    parts = [(logits[:, begin:end], begin) for begin, end in places]
    ranks = Parts(monkeypatch, parts, labels)
    whole = TokenLoss(label_smoothing=0.2, z_loss=0.1)
    *expected, gradient_of = whole.measure(logits, labels)
    gradient, counted = gradient_of(FLOAT32), (labels != -100)[:, None]
    for (begin, end), (own, start) in zip(places, parts, strict=True):
        *found, own_gradient_of = ranks.loss(start, fused=True).measure(own, labels)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(
            own_gradient_of(FLOAT32) * counted,
            gradient[:, begin:end] * counted,
            rtol=4e-6,
            atol=1e-7,
        )


FAULTS = {
    "the last block is cut off": (
        "inside = begin + places < width",
        "inside = begin + places < width - 1",
    ),
    "a sum that was not begun at its largest": (
        "tl.exp(values - most)",
        "tl.exp(values - most + 1e-4)",
    ),
    "a row further on": ("start = logits + row * width", "start = logits + row * (width + 1)"),
    "no z-loss in the gradient": ("(1 + z_factor * (largest + log))", "1"),
    "no smoothing in the gradient": (" - spread\n", "\n"),
    "the target is left in": ("values - at_target, values", "values, values"),
    "the target of the first row": ("tl.load(targets + row)", "tl.load(targets)"),
    "the largest number of the first row": ("tl.load(largest_of + row)", "tl.load(largest_of)"),
    "the sum of the first row": ("tl.load(logs + row)", "tl.load(logs)"),
    "places are those of the first block": (
        "tl.program_id(1) * BLOCK + tl.arange",
        "tl.arange",
    ),
    "totals of what is beyond the row": (
        "tl.where(inside, values, 0.0)",
        "tl.where(inside, values, 1.0)",
    ),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    kernel: Any, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    source, (right, wrong) = inspect.getsource(kernel), FAULTS[fault]
    assert right in source
    (tmp_path / "faulty_loss.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_loss", raising=False)
    monkeypatch.setitem(
        sys.modules, MODULES[1], faulty := importlib.import_module("faulty_loss")
    )
    monkeypatch.setattr("triton.language.standard._sum_combine", faulty._sum)
    torch.manual_seed(4)
    logits, labels = drawn(8, 4500, FLOAT32)
    with pytest.raises(AssertionError):
        agree(LOSSES["both"], logits, labels)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("granite", {"logits_scaling": 2.0}),
        ("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 16}),
    ],
)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_model_has_the_loss_and_gradients_of_its_operations(
    kernel: Any, kind: str, extra: dict[str, Any], dtype: torch.dtype
) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **sizes, **extra)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        head.install(model, chunk=4)
        ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
        labels = ids.roll(-1, 1).clone()
        labels[0, 3:6] = -100
        loss = TokenLoss(label_smoothing=0.1, z_loss=0.3, fused=fused)
        sums = model(input_ids=ids, labels=labels, token_loss=loss, use_cache=False)
        (sums.objective * 0.125).backward()
        results.append((sums, {name: each.grad for name, each in model.named_parameters()}))
    (plain, expected), (fused_sums, found) = results
    for one, other in zip(fused_sums[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    torch.testing.assert_close(fused_sums.of_rows, plain.of_rows, rtol=1e-5, atol=0)
    comparison = Comparison(
        compare_tensors(
            Bound("gradient", 1e-5 if dtype == FLOAT32 else 1e-2, "kernels"), found, expected
        )
    )
    assert comparison.holds, str(comparison)


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_they_compile_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, tmp_path: Any
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _forget()
    kernel = importlib.import_module(MODULES[1])
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    logits = {"logits": f"*{dtype}"}
    sums = {
        "largest_of": "*fp32",
        "logs": "*fp32",
        "totals": "*fp32",
        "width": "i32",
        "BLOCK": "constexpr",
    }
    rest = {
        "largest_of": "*fp32",
        "logs": "*fp32",
        "targets": "*i64",
        "width": "i32",
        "z_factor": "fp32",
        "spread": "fp32",
    }
    rest |= {"at_target": "fp32", "NARROW": "constexpr", "BLOCK": "constexpr"}
    each = {
        kernel._sums: (logits | sums, {"BLOCK": 4096}),
        kernel._gradients: (
            logits | {"gradients": f"*{dtype}"} | rest,
            {"NARROW": dtype == "bf16", "BLOCK": 4096},
        ),
    }
    for function, (types, constants) in each.items():
        # Rows begin at multiples of 16 bytes, as those of nearly all vocabularies do.
        aligned = {
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(types)
            if types[name] in ("i32",) or "*" in types[name]
        }
        source = ASTSource(function, types, constants, attrs=aligned)
        text = compile(source, target=GPUTarget("cuda", 90, 32), options=kernel.OPTIONS).asm[
            "ptx"
        ]
        assert re.search(r"ld\.global\S*\.v4\.b32", text), function
    _forget()
