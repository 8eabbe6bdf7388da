"""What a program does between the steps of its loop: it is kept over a stop, leaves no trace, or is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import threefold
from ranks.reference import TINY_LLAMA
from threefold.errors import ConfigError, DataError, RunError

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


def _over_all(optimizer: Any, **settings: Any) -> Any:
    """A step with an optimizer over all parameters, frozen or not."""
    return lambda model: threefold.TrainStep(
        model, optimizer(model.parameters(), lr=1e-2, **settings)
    )


def _frozen(step: Any, name: str, steps: range, number: int) -> None:
    for own, parameter in step.model.named_parameters():
        if name in own:
            parameter.requires_grad_(number not in steps)


@pytest.mark.parametrize(
    ("make", "lora", "name"),
    [
        (_over_all(torch.optim.AdamW), None, "embed_tokens"),
        (_over_all(torch.optim.SGD, momentum=0.9), None, "embed_tokens"),
        (_over_all(torch.optim.AdamW), {"r": 2}, "lora_A"),
    ],
    ids=["AdamW", "SGD", "adapters"],
)
@pytest.mark.parametrize("again", [True, False], ids=["frozen before the load", "or after it"])
def test_what_is_frozen_for_some_steps_goes_on_after_a_stop_inside_of_them(
    make: Any, lora: Any, name: str, again: bool, mesh: Any, tmp_path: Path
) -> None:
    def made() -> Any:
        model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off", lora=lora)
        return make(model)

    def trained(step: Any, numbers: range) -> list[tuple[float, float]]:
        found = []
        for number in numbers:
            _frozen(step, name, range(2, 5), number)
            found.append(tuple(step(batch(number))))
        return found

    step = made()
    unbroken = trained(step, range(7))
    first = made()
    numbers = trained(first, range(4))
    threefold.save(tmp_path, model=first.model, step=4, optimizer=first)
    second = made()
    if again:
        _frozen(second, name, range(2, 5), 4)
    threefold.load(tmp_path, model=second.model, optimizer=second)
    assert numbers + trained(second, range(4, 7)) == unbroken
    pairs = zip(step.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


def test_base_weight_that_was_trained_beside_adapters_is_kept(
    mesh: Any, tmp_path: Path
) -> None:
    make = _over_all(torch.optim.AdamW)
    models = []
    for number in range(2):
        model = threefold.load_model(
            config=TINY_LLAMA, mesh=mesh, admission="off", lora={"r": 2}
        )
        step = make(model)
        norm = model.module.get_parameter("model.norm.weight")
        if number == 0:
            norm.requires_grad_(True)
            step(batch(0))
            norm.requires_grad_(False)
            threefold.save(tmp_path, model=model, step=1, optimizer=step)
        else:
            threefold.load(tmp_path, model=model, optimizer=step)
        models.append(norm)
    assert not torch.equal(models[0], torch.ones_like(models[0]))
    assert torch.equal(*models)


class Adapted(nn.Module):
    """An adapter of one's own around a layer that is frozen, behind a norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4, affine=False), nn.Module()
        self.inner.base = nn.Linear(4, 3).requires_grad_(False)
        self.inner.lora_A = nn.ModuleDict({"default": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(x)
        return self.inner.base(x) + self.inner.lora_A["default"](x)


def test_module_of_ones_own_with_adapters_is_saved_whole(mesh: Any, tmp_path: Path) -> None:
    states = []
    for seed in (1, 2):  # a base that the program does not make again
        torch.manual_seed(seed)
        model = threefold.load_model(Adapted(), mesh=mesh)
        step = threefold.TrainStep(model, loss=loss, lr=1e-2)
        if seed == 1:
            step(rows())
            threefold.save(tmp_path, model=model, step=1, optimizer=step)
        else:
            threefold.load(tmp_path, model=model, optimizer=step)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_parameters_that_are_replaced_or_added_later_are_refused(mesh: Any) -> None:
    def replaced(module: Any) -> str:
        module.last.weight = nn.Parameter(torch.ones(3, 4))
        return "last.weight"

    def added(module: Any) -> str:
        module.more = nn.Linear(3, 3)
        return "more.weight"

    for change in (replaced, added):
        model = threefold.load_model(Net(), mesh=mesh)
        step = threefold.TrainStep(model, loss=loss)
        step(rows())
        name = change(model.module)
        with pytest.raises(ConfigError) as error:
            step(rows())
        assert str(error.value) == (
            f"{name} is not a parameter that the step was made with\n"
            "  expected: the model unchanged: what is replaced or added later would not be trained\n"
            "  fix: change the model first, and make the optimizer and TrainStep(model, ...) after it"
        )
        threefold.TrainStep(model, loss=loss)(rows())
    language = model_of(mesh)
    step = threefold.TrainStep(language)
    step(batch(1))
    language.module.resize_token_embeddings(80)
    with pytest.raises(ConfigError, match="is not a parameter that the step was made with"):
        step(batch(2))


class Counting(torch.optim.SGD):
    """Keeps a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"]["done"] = torch.ones(1)
        return super().step()


def test_state_of_an_optimizer_for_no_parameter_is_refused(mesh: Any, tmp_path: Path) -> None:
    model = threefold.load_model(Net(), mesh=mesh)
    step = threefold.TrainStep(model, Counting(model.parameters(), lr=0.1), loss=loss)
    step(rows())
    with pytest.raises(ConfigError) as error:
        threefold.save(tmp_path, model=model, step=1, optimizer=step)
    assert str(error.value) == (
        "the optimizer Counting has a state that cannot be kept: 'steps' belongs to no parameter\n"
        "  expected: tensors split like the parameters, which any mesh can read\n"
        "  fix: torch.optim.AdamW(model.parameters()), or save without optimizer="
    )
    assert not (tmp_path / "checkpoints").exists()


class Averaging(torch.optim.SGD):
    """Keeps slow weights beside its state, as wrappers like Lookahead do."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.slow = {each: each.detach().clone() for each in self.param_groups[0]["params"]}


class Wrapping(torch.optim.SGD):
    """Keeps its state in another optimizer, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.inner = torch.optim.AdamW(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


@pytest.mark.parametrize(("kind", "where"), [(Averaging, "slow"), (Wrapping, "inner")])
def test_state_that_an_optimizer_keeps_elsewhere_is_refused(
    kind: Any, where: str, mesh: Any, tmp_path: Path
) -> None:
    model = threefold.load_model(Net(), mesh=mesh)
    step = threefold.TrainStep(model, kind(model.parameters(), lr=0.1), loss=loss)
    step(rows())
    with pytest.raises(ConfigError) as error:
        threefold.save(tmp_path, model=model, step=1, optimizer=step)
    assert str(error.value).startswith(
        f"the optimizer {kind.__name__} has a state that cannot be kept: "
        f"its {where} has some, besides optimizer.state\n"
    )
    inner = getattr(step.optimizer, "inner", None)
    if inner is not None:  # it may share what it keeps
        step.optimizer.state = inner.state
        threefold.save(tmp_path, model=model, step=1, optimizer=step)


class Keeping(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"steps": 1}


def _with(**tensors: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    for name, value in tensors.items():
        set_as = module.register_parameter if isinstance(value, nn.Parameter) else None
        (set_as or module.register_buffer)(name, value)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: Keeping(2, 2),
            "a Keeping has a state of its own, _extra_state, which no checkpoint would hold\n"
            "  expected: parameters and buffers\n"
            "  fix: register_buffer, not get_extra_state",
        ),
        (
            lambda: _with(table=torch.zeros(2, dtype=torch.complex64)),
            "the buffer table of a Linear is complex64\n"
            "  expected: real numbers, which files hold\n"
            "  fix: torch.view_as_real(...), or persistent=False if it is always computed",
        ),
        (
            lambda: _with(count=nn.Parameter(torch.zeros(2).long(), requires_grad=False)),
            "the parameter count of a Linear is int64\n"
            "  expected: float32 weights; dtype= sets the type they compute in\n"
            "  fix: a buffer in its place, or a parameter of torch.view_as_real(...)",
        ),
        (
            lambda: _embedding(sparse=True),
            "Embedding '0' has sparse gradients\n"
            "  expected: dense gradients: they are summed over ranks, and clipped\n"
            "  fix: Embedding(..., sparse=False)",
        ),
        (
            lambda: torch.compile(nn.Linear(2, 2)),
            "a OptimizedModule is a module wrapped by torch\n"
            "  expected: the module itself: load_model copies or shards it\n"
            "  fix: load_model(module, mesh=mesh) with what was wrapped; then module.compile()",
        ),
    ],
    ids=["state", "complex", "integers", "sparse", "wrapped"],
)
def test_what_cannot_be_trained_or_saved_is_refused(
    module: Any, message: str, mesh: Any
) -> None:
    with pytest.raises(ConfigError) as error:
        threefold.load_model(module(), mesh=mesh)
    assert str(error.value) == message


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
        "  expected: an optimizer over all parameters ever trained: this one would leave it unchanged\n"
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
        "  expected: none: a step accumulates its own, and divides them by its count\n"
        "  fix: model.module.zero_grad(), or make its source a part of the loss"
    )
    model.module.zero_grad()
    step(batch(1))


def test_hooks_that_a_mesh_would_give_parts_of_gradients_are_refused(mesh: Any) -> None:
    def clipped(parameter: Any) -> Any:
        return parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def updated_early(parameter: Any) -> Any:
        return parameter.register_post_accumulate_grad_hook(lambda parameter: None)

    model = model_of(mesh)
    step = threefold.TrainStep(model)
    for add in (clipped, updated_early):
        hook = add(next(model.parameters()))
        with pytest.raises(ConfigError) as error:
            step(batch(1))
        assert str(error.value) == (
            "the parameter model.embed_tokens.weight has hooks on its gradient\n"
            "  expected: none: they would get parts of it on a mesh or in micro-batches, and nothing with shards\n"
            "  fix: optimizer.register_step_pre_hook(hook), where parameter.grad is complete"
        )
        hook.remove()


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


def test_step_under_autocast_is_refused(mesh: Any) -> None:
    """The forward has types of its own; the products of the backward alone would be in bfloat16."""
    step = threefold.TrainStep(model_of(mesh))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError) as error:
        step(batch(1))
    assert str(error.value) == (
        "the step runs under torch.autocast()\n"
        "  expected: none: the forward uses the model's own dtypes, and only the gradients would lose bits\n"
        "  fix: threefold.load_model(..., dtype='bfloat16'), and step(batch) outside of torch.autocast()"
    )
    step(batch(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_type_changes_no_gradient(dtype: torch.dtype, mesh: Any) -> None:
    numbers = []
    for default in (torch.float32, dtype):
        step = threefold.TrainStep(model_of(mesh))
        torch.set_default_dtype(default)
        try:
            numbers.append(step(batch(1)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


def loader_of(mesh: Any) -> Any:
    data: Any = [
        {name: rows[0] for name, rows in batch(number).items()} for number in range(12)
    ]
    return threefold.distribute(
        torch.utils.data.DataLoader(data, batch_size=2, shuffle=True), mesh=mesh
    )


OUTSIDE = (
    " outside of the run\n"
    "  expected: calls inside its `with`: before and after it, nothing is locked, watched or saved\n"
    "  fix: with threefold.Run(folder) as run: a new Run continues in the same folder"
)


def test_run_is_used_inside_of_its_with_alone(
    mesh: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    step, loader = threefold.TrainStep(model_of(mesh)), loader_of(mesh)
    run = threefold.Run(tmp_path / "run", mesh=mesh)
    with pytest.raises(ConfigError) as error:
        run.load(step, loader)
    assert str(error.value) == "run.load(...)" + OUTSIDE
    with run:
        run.load(step, loader)
        for rows in run.steps(loader, until=1):
            step(rows)
        with monkeypatch.context() as forked:
            forked.setattr("os.getpid", lambda: 1)
            run.__exit__(SystemExit, SystemExit(0), None)  # leaves the run to its parent
        run.log(accuracy=1.0)
    for call, name in (
        (lambda: list(run.steps(loader, until=2)), "run.steps(...)"),
        (lambda: run.log(accuracy=1.0), "run.log()"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == name + OUTSIDE
    with pytest.raises(ConfigError) as error, run:
        pass
    assert str(error.value) == (
        "a Run is entered twice\n"
        "  expected: one `with` for each Run, which guards it until the block ends\n"
        "  fix: with threefold.Run(folder) as run: a new Run continues in the same folder"
    )


@pytest.mark.parametrize("same_model", [True, False])
def test_step_that_a_run_does_not_save_is_refused_inside_of_it(
    same_model: bool, mesh: Any, tmp_path: Path
) -> None:
    model, loader = model_of(mesh), loader_of(mesh)
    kept = threefold.TrainStep(model)
    other = threefold.TrainStep(model if same_model else model_of(mesh))
    with threefold.Run(tmp_path / "run", mesh=mesh) as run:
        run.load(kept, loader)
        with pytest.raises(ConfigError) as again:
            run.load(other, loader)
        rows = next(run.steps(loader, until=1))
        with pytest.raises(ConfigError) as error:
            other(rows)
        kept(rows)
    assert str(error.value) == (
        "the run saves another model or optimizer than the step's\n"
        "  expected: the step that was passed to run.load: no checkpoint would have the state of this one\n"
        "  fix: run.load(step, loader) with the step that is called; make two models that both learn parts of one "
        "module, or save each with threefold.save, in a loop without a Run"
    )
    assert str(again.value) == (
        "run.load(...) is called twice\n"
        "  expected: once: a run saves one step and one loader, and the first would no longer be saved\n"
        "  fix: run.load(step, loader) with all that the run saves"
    )
    other(rows)


@pytest.mark.parametrize(("given", "shown"), [(None, "= None"), (object(), "is a object")])
def test_schedule_without_a_state_is_refused_by_a_run(
    given: Any, shown: str, mesh: Any, tmp_path: Path
) -> None:
    step = threefold.TrainStep(model_of(mesh))
    with threefold.Run(tmp_path / "run", mesh=mesh) as run, pytest.raises(ConfigError) as error:
        run.load(step, schedule=given)
    assert str(error.value) == (
        f"schedule {shown}\n"
        "  expected: a loader, sampler or schedule with state_dict() and load_state_dict()\n"
        "  fix: leave schedule out"
    )


def test_two_models_learn_by_turns_as_parts_of_one_module_of_a_run(
    mesh: Any, tmp_path: Path
) -> None:
    """As the step's error says; what is frozen in a step keeps its moments over a stop."""

    def trained(until: int, folder: str) -> torch.Tensor:
        torch.manual_seed(0)
        pair = nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 3)})
        pair.forward = lambda x: pair["second"](pair["first"](x))  # type: ignore[method-assign]
        model = threefold.load_model(pair, mesh=mesh)
        step = threefold.TrainStep(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), loss=loss
        )
        with threefold.Run(tmp_path / folder, mesh=mesh) as run:
            run.load(step)
            for _ in run.steps(itertools.repeat(None), until=until):
                for part in pair.values():
                    pair.requires_grad_(False)
                    part.requires_grad_(True)
                    step(rows())
        return torch.cat([values.detach().flatten() for values in pair.parameters()])

    trained(2, "run")
    assert torch.equal(trained(5, "run"), trained(5, "whole"))


@pytest.mark.parametrize(
    ("move", "found"),
    [
        (lambda loader: next(iter(loader)), (2, 0)),
        (lambda loader: loader.set_epoch(3), (0, 3)),
        (lambda loader: list(loader), (0, 1)),
    ],
    ids=["a look at a batch", "another epoch", "another loop"],
)
def test_loader_that_a_program_moves_ends_its_run_before_a_save_that_could_not_go_on(
    move: Any, found: tuple[int, int], mesh: Any, tmp_path: Path
) -> None:
    step, loader = threefold.TrainStep(model_of(mesh)), loader_of(mesh)
    with (
        pytest.raises(RunError) as error,
        threefold.Run(tmp_path / "run", mesh=mesh) as run,
    ):
        run.load(step, loader)
        for rows in run.steps(loader, until=4):
            step(rows)
            if run.step == 2:
                move(loader)
    assert str(error.value) == (
        f"after step 2 the loader is at position {found[0]} of epoch {found[1]}, and the run at position 4 of epoch 0\n"
        "  expected: a loader that only run.steps advances: a resume continues from its position\n"
        "  fix: inspect batches of another loader; leave out set_epoch and load_state_dict inside of the run"
    )
