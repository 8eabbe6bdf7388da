"""The fused AdamW: its kernel against single operations to the bit, those against torch's, and its code for a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from threefold.checkpoint.optimizer_state import plain_state
from threefold.model.working_copy import WorkingCopy
from threefold.optim import eightbit, fused_adamw
from threefold.optim.bfloat16_moments import NarrowAdamW
from threefold.optim.fused_adamw import FusedAdamW
from threefold.optim.fused_update import Factors, Tensors, update_by_operations

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (the extra `triton`, 198 MB)",
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 3e-3, "weight_decay": 0.1}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Of gradients, of moments, and whether there is a copy.
KINDS = list(itertools.product((FLOAT32, BFLOAT16), (FLOAT32, BFLOAT16), (True, False)))
# One number, parts of a block, whole blocks and what is left of them, in one dim and in more.
SIZES = [
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    127,
    128,
    129,
    1000,
    1023,
    1024,
    1025,
    2047,
    2048,
    2049,
    4095,
    4096,
    4097,
    6143,
    6145,
]
SHAPES = [(size,) for size in SIZES] + [
    *((1, 1), (1, 5), (5, 1), (3, 683), (2, 1024), (32, 64), (33, 65), (64, 97), (7, 293)),
    *(
        (2, 3, 5),
        (4, 8, 64),
        (16, 129),
        (1, 2049),
        (2049, 1),
        (13, 17, 19),
        (2, 2, 2, 2),
        (100, 41),
        (11, 373),
    ),
]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel's module, whose kernels Triton's interpreter computes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield _imported(monkeypatch)
    sys.modules.pop("threefold.optim.fused_kernel", None)


def _imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "threefold.optim.fused_kernel", raising=False)
    return _at_once(importlib.import_module("threefold.optim.fused_kernel"), monkeypatch)


def _at_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose largest number of a block the interpreter finds at once, not number by number."""
    monkeypatch.setattr(
        "triton.language.standard._elementwise_max", module.larger, raising=False
    )
    return module


def drawn(
    shape: tuple[int, ...], gradients: torch.dtype, moments: torch.dtype, copied: bool
) -> Tensors:
    weight, gradient, mean = torch.randn(3, *shape)
    square = torch.rand(shape) * 1e-2
    copy = torch.full(shape, 7.0, dtype=BFLOAT16) if copied else None
    return Tensors(
        weight,
        (gradient * 0.1).to(gradients),
        (mean * 0.1).to(moments),
        square.to(moments),
        copy,
    )


def begun(weight: Tensor, *, signed: bool) -> Any:
    """A moment of torchao's before the first step."""
    theirs: Any = eightbit.adamw_8bit()([nn.Parameter(weight)])
    return theirs._new_buffer(weight, signed)


def drawn_in_8_bits(shape: tuple[int, ...], gradients: torch.dtype, copied: bool) -> Tensors:
    """Moments as training leaves them: of torchao's numbers where there are blocks of them, else float32."""
    tensors = drawn(shape, gradients, FLOAT32, copied)
    moments = [begun(tensors.weight, signed=signed) for signed in (True, False)]
    for moment, values in zip(moments, tensors[2:4], strict=True):
        moment.copy_(values)
    return tensors._replace(mean=moments[0], square=moments[1])


def cloned(tensors: Tensors) -> Tensors:
    return Tensors(*(None if each is None else _clone(each) for each in tensors))  # type: ignore[arg-type]


def _clone(tensor: Any) -> Any:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, described = tensor.__tensor_flatten__()
    return type(tensor).__tensor_unflatten__(
        {name: getattr(tensor, name).clone() for name in names}, described
    )


def factors(count: int, *, clip: float = 0.37, skip: float = 0.0) -> Factors:
    return Factors(
        -1e-2 * torch.rand(count), 1 + torch.rand(count), torch.tensor(clip), torch.tensor(skip)
    )


def bits(tensors: list[Tensors]) -> list[list[int]]:
    as_bits = {BFLOAT16: torch.int16, FLOAT32: torch.int32, torch.uint8: torch.uint8}
    every = [each for one in tensors for each in one.stored if each is not None]
    return [each.view(as_bits[each.dtype]).flatten().tolist() for each in every]


@needs_triton
@pytest.mark.parametrize(("gradients", "moments", "copied"), KINDS)
def test_the_kernel_has_the_bits_of_single_operations(
    kernel: Any, gradients: torch.dtype, moments: torch.dtype, copied: bool
) -> None:
    torch.manual_seed(0)
    expected = [drawn(shape, gradients, moments, copied) for shape in SHAPES]
    assert len(SHAPES) == 40
    found, before, own = (
        [cloned(each) for each in expected],
        bits(expected),
        factors(len(SHAPES)),
    )
    update_by_operations(expected, own, GROUP)
    kernel.update_by_kernel(found, own, GROUP)
    assert bits(found) == bits(expected) != before
    # The steps after it begin with what it wrote.
    versions = [each.weight._version for each in found]
    kernel.update_by_kernel(found, own, GROUP)
    assert all(
        each.weight._version > version for each, version in zip(found, versions, strict=True)
    )


# Blocks of 256 numbers: the kernel's 2,048, and tails of one to seven; float32 below 4,096 numbers, or where blocks
# would not be whole.
IN_8_BITS = [4096, 4352, 5888, 6144, 8448, 12032, (64, 64), (17, 256), (2, 16, 160)]
WIDE = [1, 256, 3840, 4095, 4097, 4351, 6145, (65, 65)]


def in_8_bits(
    shapes: Any = (*IN_8_BITS, *WIDE), gradients: torch.dtype = BFLOAT16
) -> tuple[list[Tensors], ...]:
    """Tensors with moments of 8 bits, and those that are too small for them: launches of their own."""
    every = [
        drawn_in_8_bits(shape if isinstance(shape, tuple) else (shape,), gradients, copied)
        for shape in shapes
        for copied in (True, False)
    ]
    kinds = [(narrow, copied) for narrow in (True, False) for copied in (True, False)]
    return tuple(
        [each for each in every if (len(each.stored) > 5, each.copy is not None) == kind]
        for kind in kinds
    )


@needs_triton
@needs_torchao
@pytest.mark.parametrize("gradients", [FLOAT32, BFLOAT16])
def test_moments_of_8_bits_have_the_bits_of_torchaos(
    kernel: Any, gradients: torch.dtype
) -> None:
    torch.manual_seed(4)
    launches = in_8_bits(gradients=gradients)
    assert [len(each) for each in launches] == [len(IN_8_BITS)] * 2 + [len(WIDE)] * 2
    for expected in launches:
        found, own = [cloned(each) for each in expected], factors(len(expected))
        for _ in range(2):
            before = bits(expected)
            update_by_operations(expected, own, GROUP)
            kernel.update_by_kernel(found, own, GROUP)
            assert bits(found) == bits(expected) != before


@needs_triton
@needs_torchao
def test_every_code_and_the_numbers_between_two_are_found_as_torchao_finds_them(
    kernel: Any,
) -> None:
    """Blocks of a map's own numbers, their middles, those beside a middle, zeros, and what is not finite."""
    for signed in (True, False):
        numbers = begun(torch.zeros(4096), signed=signed).qmap
        middles = (numbers + numbers.roll(-1)) / 2
        beside = [torch.nextafter(middles, torch.full((256,), end)) for end in (9.0, -9.0)]
        odd = torch.tensor([0.0, -0.0, 1e-45, 1e-13, 1e-12, 3.4e38, -3.4e38, 1.0] * 32)
        ends = [torch.cat([odd[:255], torch.tensor([end])]) for end in (torch.inf, torch.nan)]
        scales = [torch.randn(256) * 10.0**power for power in range(-20, 3)]
        values = torch.cat(
            [
                numbers,
                middles,
                *beside,
                odd,
                torch.zeros(256),
                torch.full((256,), 1e-13),
                *ends,
                *scales,
            ]
        )
        means, squares = (begun(values, signed=each) for each in (True, False))
        # With betas of 0 the moments are the gradient and its square.
        group = {"betas": (0.0, 0.0), "eps": 1e-8, "lr": 0.0, "weight_decay": 0.0}
        gradient = values if signed else values.abs().sqrt()
        expected = Tensors(torch.zeros(len(values)), gradient, means, squares, None)
        found = cloned(expected)
        update_by_operations([expected], factors(1, clip=1.0), group)
        kernel.update_by_kernel([found], factors(1, clip=1.0), group)
        for one, other in zip(found.stored[2:], expected.stored[2:], strict=True):
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@needs_triton
def test_one_tensor_of_any_kind_and_at_an_odd_address_is_an_update(kernel: Any) -> None:
    torch.manual_seed(1)
    expected = [drawn((37, 61), *kind) for kind in KINDS] + [
        drawn((1,), *kind) for kind in KINDS
    ]
    storage = torch.randn(4099)
    expected.append(
        Tensors(storage[1:4098], torch.randn(4097), torch.randn(4097), torch.rand(4097), None)
    )
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
    ends = [
        0.0,
        -0.0,
        1e-45,
        3.4e38,
        -3.4e38,
        float("inf"),
        float("nan"),
        1.00390625,
        1.01171875,
        1e-38,
        255.5,
    ]
    patterns = (
        torch.tensor([0x7FFFFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000])
        .int()
        .view(FLOAT32)
    )
    weight = torch.cat([torch.tensor(ends), patterns])
    still = {**GROUP, "weight_decay": 0.0}
    one = Tensors(
        weight,
        torch.zeros(16),
        torch.zeros(16),
        torch.ones(16),
        torch.zeros(16, dtype=BFLOAT16),
    )
    other = cloned(one)
    update_by_operations([one], factors(1), still)
    kernel.update_by_kernel([other], factors(1), still)
    assert one.copy is not None and other.copy is not None
    torch.testing.assert_close(other.copy, weight.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert other.copy.isnan().sum() == 2


@pytest.mark.parametrize("way", ["operations", pytest.param("kernel", marks=needs_triton)])
@pytest.mark.parametrize("of_8_bits", [False, pytest.param(True, marks=needs_torchao)])
def test_a_step_that_is_skipped_changes_nothing(
    way: str, of_8_bits: bool, request: pytest.FixtureRequest
) -> None:
    tensors = [drawn((2050,), BFLOAT16, BFLOAT16, True), drawn((3,), BFLOAT16, BFLOAT16, True)]
    if of_8_bits:
        tensors = [drawn_in_8_bits((size,), BFLOAT16, True) for size in (4096, 4352)]
    tensors[0].gradient[5] = torch.nan
    before = bits(tensors)
    update = (
        update_by_operations
        if way == "operations"
        else request.getfixturevalue("kernel").update_by_kernel
    )
    update(tensors, factors(2, skip=1.0), GROUP)
    assert bits(tensors) == before


@needs_triton
@pytest.mark.parametrize(
    "fault",
    ["clip", "bias of the means", "bias of the squares", "decay", "stale copy", "cut off"],
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


FAULTS = {
    "no clipping": ("gradient *= tl.load(clip)", ""),
    "the bias of the means is another tensor's": ("tl.load(rates + number)", "tl.load(rates)"),
    "no bias of the squares": (" * tl.load(root_scales + number)", ""),
    "a stale copy": ("if WITH_COPY:", "if False:"),
    "the scale of the next block is read": (
        "scales + places // _SCALED",
        "scales + (places // _SCALED + 1) % 8",
    ),
    "the scale of the next block is written": (
        "scales + places, scale",
        "scales + (places + 1) % 8, scale",
    ),
    "a scale is the largest number's, not the farthest's": (
        "tl.abs(apart)",
        "tl.maximum(apart, 0.0)",
    ),
    "the scales of the squares for both": ("row + 3 * count", "6 * count + row % count"),
    "the map of the squares for both": ("row + 5 * count", "8 * count + row % count"),
    "numbers are cut off": (">= (high - low) * 0.5", ">= (high - low)"),
    "the last half is left out": ("tl.static_range(8)", "tl.static_range(7)"),
}


@needs_triton
@needs_torchao
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernel_of_8_bits_is_found(
    kernel: Any, fault: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    source, (right, wrong) = inspect.getsource(kernel), FAULTS[fault]
    assert right in source
    (tmp_path / "faulty.py").write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty", tmp_path / "faulty.py")
    assert spec is not None and spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    _at_once(faulty, monkeypatch)
    expected = [drawn_in_8_bits((size,), BFLOAT16, True) for size in (4096, 8448)]
    found, own = [cloned(each) for each in expected], factors(2)
    faulty.update_by_kernel(found, own, GROUP)
    update_by_operations(expected, own, GROUP)
    assert bits(found) != bits(expected)


def _cut_off(weight: Tensor) -> Tensor:
    return (weight.view(torch.int32) >> 16 << 16).view(FLOAT32).bfloat16()


@needs_triton
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "uint8"])
def test_it_compiles_for_a_gpu_without_fused_products_and_with_whole_vectors(
    monkeypatch: pytest.MonkeyPatch, moments: str, tmp_path: Any
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = _imported(monkeypatch)
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kinds = {"float32": tl.float32, "bfloat16": tl.bfloat16, "uint8": tl.uint8}
    constants = {
        "GRADIENT": tl.bfloat16,
        "MOMENTS": kinds[moments],
        "WITH_COPY": True,
        "BLOCK": 2048,
    }
    types = {
        "table": "*i64",
        "sizes": "*i64",
        "firsts": "*i32",
        "owners": "*i32",
        "count": "i32",
    }
    types |= {name: "*fp32" for name in ("rates", "root_scales", "clip", "skip")}
    types |= {
        name: "fp32" for name in ("decay", "beta", "rest", "beta_square", "rest_square", "eps")
    }
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel._update, types, constants)
    built = compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "num_warps": 8},
    )
    text = built.asm["ptx"]
    assert not re.search(r"\bfma\.", text) and "sqrt.rn.f32" in text and "div.rn.f32" in text
    assert not re.search(r"(sqrt|div)\.(approx|full)", text)
    # Eight numbers a thread: gradient and copy in one vector each, float32 in two.
    vectors = (
        len(re.findall(r"ld\.global\.v4\.b32", text)),
        len(re.findall(r"st\.global\.v4\.b32", text)),
    )
    assert vectors == {"float32": (7, 7), "bfloat16": (5, 5), "uint8": (3, 3)}[moments]
    if moments == "uint8":
        halves = (
            len(re.findall(r"ld\.global\.v2\.b32", text)),
            len(re.findall(r"st\.global\.v2\.b32", text)),
        )
        assert halves == (2, 2)
    sys.modules.pop("threefold.optim.fused_kernel", None)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(37, 61)),
            nn.Parameter(torch.randn(61)),
        )


def trained(kind: str, moments: torch.dtype, *, steps: int = 5) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model = Plain()
    parameters: Any = [*model.parameters()]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    working = WorkingCopy(model, BFLOAT16, ())
    if kind == "fused":
        optimizer: Any = FusedAdamW(parameters, working=working, moments=moments, **settings)
    else:
        optimizer = (NarrowAdamW if moments == BFLOAT16 else torch.optim.AdamW)(
            parameters, **settings
        )
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


class Wide(nn.Module):
    """Of two matrices one has blocks of 256 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(33, 512)),
            nn.Parameter(torch.randn(61, 70)),
        )


@needs_torchao
@pytest.mark.parametrize("way", ["operations", pytest.param("kernel", marks=needs_triton)])
def test_of_8_bits_it_is_torchaos_adamw(
    way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Ten steps, theirs by single operations, which round in another order."""
    if way == "kernel":
        own = request.getfixturevalue("kernel").update_by_kernel
        monkeypatch.setattr(fused_adamw, "_kernel", lambda device: own)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    torch.manual_seed(6)
    model, settings = Wide(), {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    other: Any = Wide()
    other.load_state_dict(model.state_dict())
    working = WorkingCopy(model, BFLOAT16, ())
    ours = FusedAdamW(model.parameters(), working=working, moments=torch.uint8, **settings)
    theirs = eightbit.adamw_8bit()(other.parameters(), **settings)
    working.refresh()
    ours.clip_factor = torch.tensor(0.25)
    for _ in range(10):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn(one.shape).bfloat16()
            two.grad = one.grad.float() * 0.25
        ours.step()
        theirs.step()
    working.refuse_stale()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        state, expected = (
            {name: each for name, each in plain_state(own).items() if isinstance(each, Tensor)}
            for own in (ours.state[one], theirs.state[two])  # type: ignore[arg-type]
        )
        assert list(state) == list(expected) and state["step"] == expected["step"] == 10
        assert all(state[name].dtype == each.dtype for name, each in expected.items())
        # A number between two codes may be rounded to either, which moves a later step by half of what is between them.
        for name in state.keys() & {"exp_avg.codes", "exp_avg_sq.codes"}:
            apart = (state[name].int() - expected[name].int()).abs()
            assert apart.max() <= 1 and apart.sum() <= 1e-3 * one.numel()
        apart = (one - two).abs()
        assert apart.max() <= 3e-4 and apart.flatten().quantile(0.999) <= 3e-6
    assert (
        "exp_avg.codes" in plain_state(ours.state[model.first])
        and "exp_avg" in ours.state[model.second]
    )  # type: ignore[arg-type]


def test_moments_that_torch_widens_while_it_loads_are_narrow_again() -> None:
    _, (optimizer, _) = trained("fused", BFLOAT16)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert all(each["exp_avg"].dtype == BFLOAT16 for each in optimizer.state.values())


def test_where_triton_is_missing_cuda_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fused_adamw.can_step_on(torch.device("cuda")) and fused_adamw.can_step_on(
        torch.device("cpu")
    )
