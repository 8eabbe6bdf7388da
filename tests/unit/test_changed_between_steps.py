"""What a program does between the steps of its loop: it is kept over a stop, leaves no trace, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import threefold
from ranks.reference import TINY_LLAMA
from threefold.errors import ConfigError, DataError

DYNAMIC = {
    **TINY_LLAMA,
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    mesh = threefold.init_mesh()
    yield mesh
    mesh.close()


def batch(number: int, length: int = 16) -> dict[str, torch.Tensor]:
    tokens = torch.randint(67, (4, length + 1), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def model_of(mesh: Any, config: dict[str, Any] = TINY_LLAMA) -> Any:
    return threefold.load_model(config=config, mesh=mesh, admission="off")


class Net(nn.Module):
    """With a norm whose statistics are frozen, as on data ranks they must be, and a parameter without a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.norm.eval()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.dropout(self.norm(x)))


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    if batch["y"].max() > 2:
        raise ValueError("no such class")
    return nn.functional.cross_entropy(outputs, batch["y"], reduction="sum"), len(outputs)


def rows(classes: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(6, 4), "y": torch.arange(6) % classes}


def test_evaluation_leaves_each_layer_in_its_mode_also_if_it_fails(mesh: Any) -> None:
    model = threefold.load_model(Net(), mesh=mesh)
    evaluate = threefold.EvalStep(model, loss=loss)
    for given in (rows(), rows(classes=6)):
        try:
            evaluate([given])
        except ValueError as error:
            assert str(error) == "no such class"
        assert (model.module.training, model.module.dropout.training) == (True, True)
        assert not model.module.norm.training


def test_parameter_without_numbers_is_saved_and_loaded(mesh: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        model = threefold.load_model(Net(), mesh=mesh)
        step = threefold.TrainStep(model, loss=loss, lr=1e-2)
        if number == 2:
            found = threefold.load(tmp_path, model=model, optimizer=step)
            assert found is not None and found.step == 1
        step(rows())
        if number == 1:
            threefold.save(tmp_path, model=model, step=1, optimizer=step)


def _stopped(folder: Path, mesh: Any, make: Any, change: Any) -> list[tuple[float, float]]:
    """The numbers of four steps, saved and loaded after the second, before which `change` was called."""
    numbers = []
    for steps in ((1, 2), (3, 4)):
        step = make(model_of(mesh))
        if steps[0] > 1:
            threefold.load(folder, model=step.model, optimizer=step)
        for number in steps:
            if number == 2:
                change(step)
            numbers.append(tuple(step(batch(number))))
        if steps[0] == 1:
            threefold.save(folder, model=step.model, step=2, optimizer=step)
    return numbers


def _unbroken(mesh: Any, make: Any, change: Any) -> list[tuple[float, float]]:
    step, numbers = make(model_of(mesh)), []
    for number in range(1, 5):
        if number == 2:
            change(step)
        numbers.append(tuple(step(batch(number))))
    return numbers


def _with_tensor_rate(model: Any) -> Any:
    rate = torch.tensor(1e-2)
    return threefold.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    )


def _slower(step: Any) -> None:
    step.optimizer.param_groups[0]["lr"].fill_(1e-3)


def _decay_more(step: Any) -> None:
    for group in step.optimizer.param_groups:
        group["weight_decay"] *= 5


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (_with_tensor_rate, _slower),
        (lambda model: threefold.TrainStep(model, lr=1e-2, weight_decay=0.1), _decay_more),
    ],
    ids=["rate that is a tensor", "decay of the step's own optimizer"],
)
def test_what_is_set_by_hand_goes_on_after_a_stop(
    make: Any, change: Any, mesh: Any, tmp_path: Path
) -> None:
    assert _stopped(tmp_path, mesh, make, change) == _unbroken(mesh, make, change)


def test_decay_that_the_program_gives_anew_counts(mesh: Any, tmp_path: Path) -> None:
    model = model_of(mesh)
    step = threefold.TrainStep(model, weight_decay=0.1)
    step(batch(1))
    threefold.save(tmp_path, model=model, step=1, optimizer=step)
    again = threefold.TrainStep(model, weight_decay=0.2)
    threefold.load(tmp_path, model=model, optimizer=again)
    assert {group["weight_decay"] for group in again.optimizer.param_groups} == {0.2, 0.0}


def test_unfreezing_needs_an_optimizer_that_has_the_parameter(mesh: Any) -> None:
    model = model_of(mesh)
    threefold.freeze(model, ["embed_tokens"])
    step = threefold.TrainStep(model)
    step(batch(1))
    next(model.parameters()).requires_grad_(True)
    with pytest.raises(ConfigError) as error:
        step(batch(2))
    assert str(error.value) == (
        "requires_grad of model.embed_tokens.weight was set to True, and the step's own optimizer does not have it\n"
        "  expected: an optimizer over all that is ever trained: this one would leave it as it is\n"
        "  fix: TrainStep(model, torch.optim.AdamW(model.parameters()))"
    )
    before = next(model.parameters()).clone()
    threefold.TrainStep(model, torch.optim.AdamW(model.parameters()))(batch(2))
    assert not torch.equal(before, next(model.parameters()))


def test_gradient_that_is_there_before_a_step_is_refused(mesh: Any) -> None:
    model = model_of(mesh)
    step = threefold.TrainStep(model)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    with pytest.raises(ConfigError) as error:
        step(batch(1))
    assert str(error.value) == (
        "model.embed_tokens.weight has a gradient before the step\n"
        "  expected: none: a step adds up its own, and divides them by what it counts\n"
        "  fix: model.module.zero_grad(), or what it is the gradient of as a part of the loss"
    )
    model.module.zero_grad()
    step(batch(1))


def test_text_that_is_longer_than_the_model_has_positions_for_is_refused(mesh: Any) -> None:
    model = model_of(mesh, DYNAMIC)
    step, evaluate = threefold.TrainStep(model), threefold.EvalStep(model)
    step(batch(1))
    long = batch(2, length=32)
    for call in (
        lambda: step(long),
        lambda: evaluate([long]),
        lambda: model(input_ids=long["input_ids"]),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == (
            "the batch has a text of 32 tokens, but the model supports at most 16 positions\n"
            "  expected: rows, or documents in them, that are no longer than the model's max_position_embeddings\n"
            "  fix: rows of at most 16 tokens"
        )
    documents = torch.arange(32).expand(4, 32) // 16
    step({**long, "document_ids": documents.contiguous()})


def test_writing_a_long_text_leaves_no_trace_in_the_steps_after_it(mesh: Any) -> None:
    def numbers(writes: bool) -> list[Any]:
        model = model_of(mesh, DYNAMIC)
        step = threefold.TrainStep(model, lr=1e-2)
        first = tuple(step(batch(1)))
        if writes:
            model.generate(batch(1)["input_ids"][:, :8], max_new_tokens=24)
        return [first, tuple(step(batch(2)))]

    assert numbers(writes=True) == numbers(writes=False)


def _embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, **options), nn.Linear(4, 2))


def test_gradients_that_count_tokens_are_refused_with_micro_batches(mesh: Any) -> None:
    model = threefold.load_model(_embedding(scale_grad_by_freq=True), mesh=mesh)
    with pytest.raises(ConfigError, match="Embedding '0' mixes the rows of a micro-batch"):
        threefold.TrainStep(model, loss=loss, micro_batch=2)


def test_nothing_to_learn_still_leaves_the_next_step_as_it_is(mesh: Any) -> None:
    model = model_of(mesh)
    step = threefold.TrainStep(model)
    nothing = batch(1)
    nothing["labels"][:] = -100
    with pytest.raises(DataError):
        step(nothing)
    step(batch(2))
