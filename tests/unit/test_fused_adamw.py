"""The fused AdamW: its kernel against single operations to the bit, those against torch's, and its code for a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from threefold.model.working_copy import WorkingCopy
from threefold.optim import fused_adamw
from threefold.optim.bfloat16_moments import NarrowAdamW
from threefold.optim.fused_adamw import FusedAdamW
from threefold.optim.fused_update import Factors, Tensors, update_by_operations

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra `triton`, 198 MB)"
)
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 3e-3, "weight_decay": 0.1}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Of gradients, of moments, and whether there is a copy.
KINDS = list(itertools.product((FLOAT32, BFLOAT16), (FLOAT32, BFLOAT16), (True, False)))
# One number, parts of a block, whole blocks and what is left of them, in one dim and in more.
SIZES = [0, 1, 2, 3, 7, 8, 31, 127, 128, 129, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 6143, 6145]
SHAPES = [(size,) for size in SIZES] + [
    *((1, 1), (1, 5), (5, 1), (3, 683), (2, 1024), (32, 64), (33, 65), (64, 97), (7, 293)),
    *((2, 3, 5), (4, 8, 64), (16, 129), (1, 2049), (2049, 1), (13, 17, 19), (2, 2, 2, 2), (100, 41), (11, 373)),
]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel's module, whose kernels Triton's interpreter computes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield _imported(monkeypatch)
    sys.modules.pop("threefold.optim.fused_kernel", None)


def _imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "threefold.optim.fused_kernel", raising=False)
    return importlib.import_module("threefold.optim.fused_kernel")


def drawn(shape: tuple[int, ...], gradients: torch.dtype, moments: torch.dtype, copied: bool) -> Tensors:
    weight, gradient, mean = torch.randn(3, *shape)
    square = torch.rand(shape) * 1e-2
    copy = torch.full(shape, 7.0, dtype=BFLOAT16) if copied else None
    return Tensors(weight, (gradient * 0.1).to(gradients), (mean * 0.1).to(moments), square.to(moments), copy)


def cloned(tensors: Tensors) -> Tensors:
    return Tensors(*(None if each is None else each.clone() for each in tensors))  # type: ignore[arg-type]


def factors(count: int, *, clip: float = 0.37, skip: float = 0.0) -> Factors:
    return Factors(-1e-2 * torch.rand(count), 1 + torch.rand(count), torch.tensor(clip), torch.tensor(skip))


def bits(tensors: list[Tensors]) -> list[list[int]]:
    every = [each for one in tensors for each in one if each is not None]
    return [each.view(torch.int16 if each.dtype == BFLOAT16 else torch.int32).flatten().tolist() for each in every]


@needs_triton
@pytest.mark.parametrize(("gradients", "moments", "copied"), KINDS)
def test_the_kernel_has_the_bits_of_single_operations(
    kernel: Any, gradients: torch.dtype, moments: torch.dtype, copied: bool
) -> None:
    torch.manual_seed(0)
    expected = [drawn(shape, gradients, moments, copied) for shape in SHAPES]
    assert len(SHAPES) == 40
    found, begun, own = [cloned(each) for each in expected], bits(expected), factors(len(SHAPES))
    update_by_operations(expected, own, GROUP)
    kernel.update_by_kernel(found, own, GROUP)
    assert bits(found) == bits(expected) != begun
    # The steps after it begin with what it wrote.
    versions = [each.weight._version for each in found]
    kernel.update_by_kernel(found, own, GROUP)
    assert all(each.weight._version > version for each, version in zip(found, versions, strict=True))


@needs_triton
def test_one_tensor_of_any_kind_and_at_an_odd_address_is_an_update(kernel: Any) -> None:
    torch.manual_seed(1)
    expected = [drawn((37, 61), *kind) for kind in KINDS] + [drawn((1,), *kind) for kind in KINDS]
    storage = torch.randn(4099)
    expected.append(Tensors(storage[1:4098], torch.randn(4097), torch.randn(4097), torch.rand(4097), None))
    found, own = [cloned(each) for each in expected[:-1]], factors(len(expected))
    apart = torch.cat([torch.zeros(1), storage[1:]])
    found.append(Tensors(apart[1:4098], *(each.clone() for each in expected[-1][1:4]), None))
    assert found[-1].weight.data_ptr() % 16
    for place, pair in enumerate(zip(found, expected, strict=True)):
        one = Factors(own.rates[place:][:1], own.root_scales[place:][:1], own.clip, own.skip)
        kernel.update_by_kernel(pair[:1], one, GROUP)
        update_by_operations(pair[1:], one, GROUP)
    assert bits(found) == bits(expected)


@needs_triton
def test_numbers_at_the_ends_are_rounded_as_torch_rounds(kernel: Any) -> None:
    ends = [0.0, -0.0, 1e-45, 3.4e38, -3.4e38, float("inf"), float("nan"), 1.00390625, 1.01171875, 1e-38, 255.5]
    patterns = torch.tensor([0x7FFFFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000]).int().view(FLOAT32)
    weight = torch.cat([torch.tensor(ends), patterns])
    still = {**GROUP, "weight_decay": 0.0}
    one = Tensors(weight, torch.zeros(16), torch.zeros(16), torch.ones(16), torch.zeros(16, dtype=BFLOAT16))
    other = cloned(one)
    update_by_operations([one], factors(1), still)
    kernel.update_by_kernel([other], factors(1), still)
    assert one.copy is not None and other.copy is not None
    torch.testing.assert_close(other.copy, weight.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert other.copy.isnan().sum() == 2


@pytest.mark.parametrize("way", ["operations", pytest.param("kernel", marks=needs_triton)])
def test_a_step_that_is_skipped_changes_nothing(way: str, request: pytest.FixtureRequest) -> None:
    tensors = [drawn((2050,), BFLOAT16, BFLOAT16, True), drawn((3,), BFLOAT16, BFLOAT16, True)]
    tensors[0].gradient[5] = torch.nan
    before = bits(tensors)
    update = update_by_operations if way == "operations" else request.getfixturevalue("kernel").update_by_kernel
    update(tensors, factors(2, skip=1.0), GROUP)
    assert bits(tensors) == before


@needs_triton
@pytest.mark.parametrize(
    "fault", ["clip", "bias of the means", "bias of the squares", "decay", "stale copy", "cut off"]
)
def test_a_fault_in_either_is_found(kernel: Any, fault: str) -> None:
    torch.manual_seed(2)
    expected = [drawn((3000,), BFLOAT16, FLOAT32, True), drawn((5,), BFLOAT16, FLOAT32, True)]
    found, own, group = [cloned(each) for each in expected], factors(2), GROUP
    update_by_operations(expected, own, GROUP)
    ones = torch.ones(2)
    if fault == "clip":
        own = Factors(own.rates, own.root_scales, torch.tensor(0.37 + 1e-7), own.skip)
    elif fault == "bias of the means":
        own = Factors(ones * -GROUP["lr"], own.root_scales, own.clip, own.skip)  # type: ignore[operator]
    elif fault == "bias of the squares":
        own = Factors(own.rates, ones, own.clip, own.skip)
    elif fault == "decay":
        group = {**GROUP, "weight_decay": 0.0}
    elif fault == "stale copy":
        found = [Tensors(*each[:4], None) for each in found]
    kernel.update_by_kernel(found, own, group)
    if fault == "stale copy":
        found = [Tensors(*one[:4], drawn((1,), *KINDS[0]).copy) for one in found]
    if fault == "cut off":
        found = [Tensors(*one[:4], _cut_off(one.weight)) for one in found]
    assert bits(found) != bits(expected)


def _cut_off(weight: Tensor) -> Tensor:
    return (weight.view(torch.int32) >> 16 << 16).view(FLOAT32).bfloat16()


@needs_triton
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_it_compiles_for_a_gpu_without_fused_products_and_with_whole_vectors(
    monkeypatch: pytest.MonkeyPatch, moments: str, tmp_path: Any
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = _imported(monkeypatch)
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kinds = {"float32": tl.float32, "bfloat16": tl.bfloat16}
    constants = {"GRADIENT": tl.bfloat16, "MOMENTS": kinds[moments], "WITH_COPY": True, "BLOCK": 2048}
    types = {"table": "*i64", "sizes": "*i64", "firsts": "*i32", "owners": "*i32", "count": "i32"}
    types |= {name: "*fp32" for name in ("rates", "root_scales", "clip", "skip")}
    types |= {name: "fp32" for name in ("decay", "beta", "rest", "beta_square", "rest_square", "eps")}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel._update, types, constants)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, "num_warps": 8})
    text = built.asm["ptx"]
    assert not re.search(r"\bfma\.", text) and "sqrt.rn.f32" in text and "div.rn.f32" in text
    assert not re.search(r"(sqrt|div)\.(approx|full)", text)
    # Eight numbers a thread: gradient and copy in one vector each, float32 in two.
    vectors = len(re.findall(r"ld\.global\.v4\.b32", text)), len(re.findall(r"st\.global\.v4\.b32", text))
    assert vectors == ((7, 7) if moments == "float32" else (5, 5))
    sys.modules.pop("threefold.optim.fused_kernel", None)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(37, 61)), nn.Parameter(torch.randn(61))


def trained(kind: str, moments: torch.dtype, *, steps: int = 5) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model = Plain()
    parameters: Any = [*model.parameters()]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    working = WorkingCopy(model, BFLOAT16, ())
    if kind == "fused":
        optimizer: Any = FusedAdamW(parameters, working=working, moments=moments, **settings)
    else:
        optimizer = (NarrowAdamW if moments == BFLOAT16 else torch.optim.AdamW)(parameters, **settings)
    if kind == "fused":
        working.refresh()
    for _ in range(steps):
        for each in parameters:
            gradient = torch.randn(each.shape).bfloat16()
            each.grad = gradient if kind == "fused" else gradient.float() * 0.25
        if kind == "fused":
            optimizer.clip_factor = torch.tensor(0.25)
        optimizer.step()
    return [each.detach() for each in parameters], (optimizer, working)


@pytest.mark.parametrize("moments", [FLOAT32, BFLOAT16])
def test_it_is_torchs_adamw(moments: torch.dtype) -> None:
    found, (optimizer, working) = trained("fused", moments)
    expected, _ = trained("torch", moments)
    # A number of 5 updates of 0.01 whose float32 operations round in another order; a moment may then fall on the other
    # side of bfloat16, whose numbers are 2**-8 apart.
    bound = 1e-6 if moments == FLOAT32 else 2e-4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound)
    working.refuse_stale()
    state = next(iter(optimizer.state.values()))
    assert state["step"] == 5 and state["exp_avg"].dtype == moments


def test_moments_that_torch_widens_while_it_loads_are_narrow_again() -> None:
    _, (optimizer, _) = trained("fused", BFLOAT16)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert all(each["exp_avg"].dtype == BFLOAT16 for each in optimizer.state.values())


def test_where_triton_is_missing_cuda_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fused_adamw.can_step_on(torch.device("cuda")) and fused_adamw.can_step_on(torch.device("cpu"))
