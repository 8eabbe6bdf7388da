"""A working copy: FSDP2's steps on a mesh of one, to the bit, and copies that are never older than their weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import threefold
from ranks.reference import TINY_LLAMA, make_batches
from ranks.test_bfloat16 import KEPT, MODELS
from threefold.checkpoint.optimizer_state import optimizer_state
from threefold.config.loading import validate
from threefold.errors import RunError
from threefold.mesh.mesh import init_mesh
from threefold.model import load
from threefold.model.build import build
from threefold.model.collectives import local_part
from threefold.model.model import Model
from threefold.optim.build import build_optimizer
from threefold.optim.ema import Ema
from threefold.optim.fused_adamw import FusedAdamW
from threefold.plan import choices
from threefold.training.evaluation import EvalStep
from threefold.training.step import TrainStep, mean_loss

TIED = {**TINY_LLAMA, "tie_word_embeddings": True}
STEPS = 6


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process."""
    alone = init_mesh(1, device="cpu")
    yield alone
    alone.close()


def built_on(mesh: Any, architecture: dict[str, Any], **sections: Any) -> Model:
    values = {
        "model": {"config": architecture, "dtype": "bfloat16", **sections.pop("model", {})},
        "data": {"seq_len": 16},
    }
    config = validate({**values, "optimizer": {"lr": 1e-3}, **sections})
    return build(config, load.read_config(config.model), mesh)


class Steps:
    """Some steps of a model: losses and norms, gradients before clipping, and weights after them."""

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        pieces: int,
        clip: float,
        lr: float = 1e-3,
    ):
        self.model, self.gradients, self.curve = (
            model,
            list[dict[str, Tensor]](),
            list[tuple[float, float]](),
        )
        step = TrainStep(model, optimizer, grad_clip=clip, observe=self._observe)
        for batch in make_batches(steps=STEPS, rows=8, seq_len=16):
            parts = [
                {name: rows[part::pieces].contiguous() for name, rows in batch.items()}
                for part in range(pieces)
            ]
            result = step.run(parts, lr=lr)
            self.curve.append((mean_loss(result, model.mesh), result.grad_norm.item()))
        self.weights = {
            name: local_part(each).detach().clone() for name, each in model.named_parameters()
        }

    def _observe(self) -> None:
        named = (
            (name, each.grad)
            for name, each in self.model.named_parameters()
            if each.grad is not None
        )
        self.gradients.append(
            {name: local_part(gradient).float().clone() for name, gradient in named}
        )


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def by_fsdp(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, architecture: dict[str, Any], **sections: Any
) -> Model:
    with monkeypatch.context() as patched:
        patched.setattr(choices, "working_copy", lambda *arguments, **settings: False)
        found = built_on(mesh, architecture, **sections)
    assert found.working is None and "FSDP" in type(found.module).__name__
    return found


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["llama", "tied", *(name for name in MODELS if name != "llama")]
)
def test_steps_are_those_of_fsdp_on_a_mesh_of_one(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, name: str, pieces: int
) -> None:
    values = {**MODELS, "tied": TIED}[name]
    # With what stays float32, FSDP2's path adds the squares of a norm in another order: it would clip otherwise.
    kept = bool(KEPT.get(name))
    settings = {"pieces": pieces, "clip": 0.0 if kept else 0.5}
    model = by_fsdp(mesh, monkeypatch, values)
    expected = Steps(
        model, build_optimizer(model.module, validate({}).optimizer, exact=True), **settings
    )
    model = built_on(mesh, values)
    optimizer = build_optimizer(model.module, validate({}).optimizer, working=model.working)
    found = Steps(model, optimizer, **settings)
    assert type(optimizer) is FusedAdamW
    assert all(same(*pair) for pair in zip(found.gradients, expected.gradients, strict=True))
    assert same(found.weights, expected.weights)
    assert [loss for loss, _ in found.curve] == [loss for loss, _ in expected.curve]
    if not kept:
        assert found.curve == expected.curve and min(norm for _, norm in found.curve) > 0.5, (
            "nothing is clipped"
        )
    assert [norm for _, norm in found.curve] == pytest.approx(
        [norm for _, norm in expected.curve], rel=3e-7
    )


@pytest.mark.parametrize(
    ("optimizer", "pieces"), [("muon", 2), ("sgd", 1), ("adafactor", 2), ("torch", 1)]
)
def test_other_optimizers_update_the_weights_and_the_copies_follow(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, optimizer: str, pieces: int
) -> None:
    asked = validate(
        {"optimizer": {"name": "adamw" if optimizer == "torch" else optimizer}}
    ).optimizer
    model = by_fsdp(mesh, monkeypatch, TINY_LLAMA)
    expected = Steps(model, build_optimizer(model.module, asked, mesh), pieces=pieces, clip=0.5)
    model = built_on(mesh, TINY_LLAMA)
    working = None if optimizer == "torch" else model.working
    found = Steps(
        model,
        build_optimizer(model.module, asked, mesh, working=working),
        pieces=pieces,
        clip=0.5,
    )
    # Kernels of torch take a DTensor's numbers in another order than a tensor's.
    assert [loss for loss, _ in found.curve] == pytest.approx(
        [loss for loss, _ in expected.curve], abs=5e-3
    )
    assert found.curve[0] == expected.curve[0] and same(
        found.gradients[0], expected.gradients[0]
    )
    assert optimizer != "sgd" or same(found.weights, expected.weights)
    assert model.working is not None
    model.working.refuse_stale()


def test_gradients_of_a_custom_loss_are_scaled_in_float32(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        ), 31

    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    gradients = []
    for model in (by_fsdp(mesh, monkeypatch, TINY_LLAMA), built_on(mesh, TINY_LLAMA)):
        kept: dict[str, Tensor] = {}

        def observe(model: Model = model, kept: dict[str, Tensor] = kept) -> None:
            kept.update(
                {name: local_part(each.grad).clone() for name, each in model.named_parameters()}
            )

        TrainStep(model, loss=loss, observe=observe)(batch)
        gradients.append(kept)
    assert same(*gradients)


def test_between_steps_its_parameters_are_float32_and_inside_they_are_not(mesh: Any) -> None:
    model = built_on(mesh, TIED)
    names = [name for name, _ in model.named_parameters()]
    assert model.working is not None
    with pytest.raises(ZeroDivisionError), model.weights_in_place(), model.weights_in_place():
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
        assert [name for name, _ in model.named_parameters()] == names
        raise ZeroDivisionError
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    average = Ema(model.module, 0.9)
    assert {each.dtype for each in average.state().values()} == {torch.float32}


def _logits(model: Model) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(16)[None])
    return logits


def _evaluated(model: Model) -> float:
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    return EvalStep(model)([batch]).loss


@pytest.mark.parametrize("measured", [_logits, _evaluated])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_weights_that_a_program_changes_are_those_that_are_computed_with(
    mesh: Any, measured: Any, way: str
) -> None:
    model, other = built_on(mesh, TINY_LLAMA), built_on(mesh, TINY_LLAMA)
    assert torch.equal(torch.as_tensor(measured(model)), torch.as_tensor(measured(other)))
    for one in (model, other):
        weight = one.module.model.layers[0].mlp.up_proj.weight
        with torch.no_grad():
            (weight if way == "in place" and one is model else weight.data).mul_(3.0)
    assert other.working is not None
    other.working._make()  # from the changed weights
    other.working.forget()
    changed = torch.as_tensor(measured(model))
    assert torch.equal(changed, torch.as_tensor(measured(other)))
    assert not torch.equal(changed, torch.as_tensor(measured(built_on(mesh, TINY_LLAMA))))


def test_weights_read_from_a_checkpoint_are_computed_with(mesh: Any, tmp_path: Path) -> None:
    model = built_on(mesh, TINY_LLAMA)
    step = TrainStep(model, lr=1e-2)
    first, second = make_batches(steps=2, rows=2, seq_len=16)
    threefold.save(tmp_path, model=model, optimizer=step.optimizer, step=1)
    step(first)
    threefold.load(tmp_path, model=model, optimizer=step.optimizer)
    assert step(second).loss == TrainStep(built_on(mesh, TINY_LLAMA), lr=1e-2)(second).loss


@pytest.mark.parametrize("first", ["fused", "torchao"])
def test_moments_of_8_bits_continue_from_a_checkpoint(
    mesh: Any, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; from torchao's class too, whose state has the same names."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    sizes = {
        **TINY_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    asked = validate({"optimizer": {"name": "adamw_8bit"}}).optimizer

    def steps_of(fused: bool) -> TrainStep:
        model = built_on(mesh, sizes)
        return TrainStep(
            model,
            build_optimizer(model.module, asked, working=model.working if fused else None),
        )

    batches = make_batches(steps=4, rows=2, seq_len=16)
    whole = steps_of(first == "fused")
    assert (type(whole.optimizer) is FusedAdamW) == (first == "fused")
    for number, batch in enumerate(batches):
        if number == 2:
            threefold.save(tmp_path, model=whole.model, optimizer=whole.optimizer, step=2)
        whole.run([batch], lr=1e-2)
    again = steps_of(True)
    threefold.load(tmp_path, model=again.model, optimizer=again.optimizer)
    kept = optimizer_state(again.model.module, again.optimizer)
    assert {each.dtype for name, each in kept.items() if ".codes." in name} == {torch.uint8}
    for batch in batches[2:]:
        again.run([batch], lr=1e-2)
    states = [optimizer_state(each.model.module, each.optimizer) for each in (whole, again)]
    assert states[0].keys() == states[1].keys()
    if first == "fused":
        assert all(torch.equal(states[0][name], each) for name, each in states[1].items())
        assert same(*(dict(each.model.module.named_parameters()) for each in (again, whole)))
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-3)


@pytest.mark.parametrize("factor", [2.0, torch.nan])
def test_a_copy_that_is_older_than_its_weight_ends_training(mesh: Any, factor: float) -> None:
    model = built_on(mesh, TINY_LLAMA)
    step = TrainStep(model, lr=1e-3)
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    step(batch)
    step._compare_every = 1
    model.module.model.norm.weight.data[3] *= factor
    with pytest.raises(
        RunError,
        match=r"the bfloat16 copy of model\.norm\.weight is not that of its float32 weight",
    ):
        step(batch)
    with torch.no_grad():
        model.module.model.norm.weight.mul_(1.0)
    step(batch)


def test_a_step_that_is_not_finite_leaves_weights_moments_and_copies(mesh: Any) -> None:
    model = built_on(mesh, TINY_LLAMA)
    optimizer = build_optimizer(model.module, validate({}).optimizer, working=model.working)
    step = TrainStep(model, optimizer, observe=lambda: None)
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    step.run([batch], lr=1e-3)
    kept = [each.detach().clone() for each in (*model.parameters(), *_moments(optimizer))]
    step._observe = lambda: None
    norm = model.sums.norm
    object.__setattr__(model, "sums", _NotFinite(model.sums, norm))
    step.run([batch], lr=1e-3)
    after = [*model.parameters(), *_moments(optimizer)]
    assert all(torch.equal(one, other) for one, other in zip(after, kept, strict=True))
    assert model.working is not None
    model.working.refuse_stale()


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for state in optimizer.state.values() for each in state.values()]


class _NotFinite:
    """Sums whose norm is not a number."""

    def __init__(self, sums: Any, norm: Any) -> None:
        self._sums, self._norm = sums, norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sums, name)

    def norm(self, gradients: Any) -> Tensor:
        found: Tensor = self._norm(gradients) * torch.nan
        return found


def test_what_adapters_leave_frozen_is_in_bfloat16_alone(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: dict[str, Any] = {
        "model": {"lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]}}
    }
    model = by_fsdp(mesh, monkeypatch, TINY_LLAMA, **adapted)
    expected = Steps(
        model,
        build_optimizer(model.module, validate({}).optimizer, exact=True),
        pieces=2,
        clip=0.5,
    )
    model = built_on(mesh, TINY_LLAMA, **adapted)
    types = {(each.requires_grad, each.dtype) for each in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    optimizer = build_optimizer(model.module, validate({}).optimizer, working=model.working)
    found = Steps(model, optimizer, pieces=2, clip=0.5)
    assert found.curve == expected.curve
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in trained)


def test_frozen_later_it_has_no_gradient(mesh: Any) -> None:
    from threefold.model.model import freeze

    model = built_on(mesh, TINY_LLAMA)
    freeze(model, ["embed_tokens", r"layers\.0\."])
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    step = TrainStep(model, lr=1e-2)
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    step(batch)
    moved = {
        name for name, each in model.named_parameters() if not torch.equal(each, before[name])
    }
    assert moved == {name for name, each in model.named_parameters() if each.requires_grad}


def test_frozen_for_a_step_it_is_trained_again(mesh: Any) -> None:
    model = built_on(mesh, TINY_LLAMA)
    step = TrainStep(model, lr=1e-2, micro_batch=1)
    weight = model.module.get_parameter("model.layers.0.mlp.up_proj.weight")
    moved = []
    for number, batch in enumerate(make_batches(steps=4, rows=2, seq_len=16)):
        weight.requires_grad_(number % 2 == 0)
        before = weight.detach().clone()
        step(batch)
        moved.append(not torch.equal(weight, before))
    assert moved == [True, False, True, False]
