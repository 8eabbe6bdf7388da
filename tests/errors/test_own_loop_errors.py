"""Texts of what a loop of one's own can get wrong, each raised before anything is computed or written."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import threefold
from ranks.reference import TINY_LLAMA
from ranks.spawn import run_ranks
from threefold.errors import CheckpointError, ConfigError, DataError, RunError, ThreefoldError
from threefold.run.user_objects import Hooks

IDS = torch.randint(67, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}


@pytest.fixture(scope="module")
def mesh() -> Any:
    return threefold.init_mesh(dp=1)


@pytest.fixture(scope="module")
def model(mesh: Any) -> Any:
    return threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")


@pytest.fixture(autouse=True)
def _closed(mesh: Any) -> Iterator[None]:
    yield
    mesh.close()


def what(error: pytest.ExceptionInfo[ThreefoldError]) -> str:
    (problem,) = error.value.problems
    assert problem.expected and problem.fix
    return problem.what


def test_a_model_is_one_line_and_refuses_what_a_mesh_cannot_do(model: Any, mesh: Any) -> None:
    size = sum(values.numel() for values in model.parameters())
    assert repr(model) == f"Model(LlamaForCausalLM, {size:,} parameters, {mesh.topology})"
    assert model.device == mesh.device
    with pytest.raises(ConfigError) as refused:
        model.requires_grad_(False)
    assert what(refused) == "model.requires_grad_(False)"
    with pytest.raises(ConfigError) as refused:
        model.load_state_dict(model.state_dict())
    assert what(refused) == "model.load_state_dict(...)"


def test_a_callback_needs_no_hook_but_those_that_it_writes(tmp_path: Path) -> None:
    class Watch(threefold.Callback):
        def on_step(self, facts: threefold.Facts) -> bool:
            return facts.step == 2

    stopped: list[int] = []
    hooks = Hooks([Watch()], tmp_path, lambda: stopped.append(1))
    for step in (1, 2):
        hooks.log({"step": step, "loss": 1.0})
    hooks.ended(2, "hook")
    assert stopped == [1]


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (np.True_, True),
        (torch.tensor(True), True),
        (np.False_, False),
        (None, False),
        ("x", False),
    ],
    ids=str,
)
def test_a_hook_stops_a_run_with_the_truth_of_numpy_and_torch(
    answer: Any, stops: bool, tmp_path: Path
) -> None:
    class Watch:
        def on_eval(self, facts: threefold.Facts) -> Any:
            return answer

    stopped: list[int] = []
    Hooks([Watch()], tmp_path, lambda: stopped.append(1)).log({"step": 1, "eval_loss": 1.0})
    assert bool(stopped) == stops


def test_a_hook_that_ends_its_process_is_named(tmp_path: Path) -> None:
    class Exits:
        def on_step(self, facts: threefold.Facts) -> None:
            sys.exit(0)

    with pytest.raises(RunError, match=r"Exits.on_step raised SystemExit after step 3: 0 \("):
        Hooks([Exits()], tmp_path, lambda: None).log({"step": 3, "loss": 1.0})


MASK = torch.ones(4, 8, dtype=torch.int64)
HOLES = MASK.clone()
HOLES[:, :3] = 0


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([IDS], "the batch is a list"),
        ({}, "the batch has nothing for input_ids"),
        ({"input_ids": IDS.int(), "labels": IDS}, "the batch has int32 [4, 9] for input_ids"),
        ({"input_ids": IDS[0], "labels": IDS[0]}, "the batch has int64 [9] for input_ids"),
        ({"input_ids": IDS[:0], "labels": IDS[:0]}, "the batch has int64 [0, 9] for input_ids"),
        ({"input_ids": IDS}, "the batch has no labels"),
        (
            {"input_ids": IDS, "labels": IDS},
            "the labels are the input_ids themselves, not shifted by one token",
        ),
        (
            {"input_ids": IDS, "labels": IDS.where(IDS > 20, -100)},
            "the labels are the input_ids themselves, not shifted by one token",
        ),
        (
            {**BATCH, "labels": IDS[:, 2:]},
            "the batch has int64 [4, 7] for labels, and [4, 8] input_ids",
        ),
        (
            {**BATCH, "position_ids": torch.arange(8)},
            "the batch has int64 [8] for position_ids, and [4, 8] input_ids",
        ),
        (
            {**BATCH, "attention_mask": HOLES},
            "the batch has an attention_mask that is not all ones",
        ),
        ({**BATCH, "weights": MASK}, "the batch has 'weights', which the step does not know"),
        ({**BATCH, "labels": BATCH["labels"] + 60}, "the batch has "),
        ({**BATCH, "input_ids": BATCH["input_ids"] - 60}, "the batch has "),
        (
            {**BATCH, "labels": BATCH["labels"].float()},
            "the batch has float32 [4, 8] for labels",
        ),
        (
            {**BATCH, "document_ids": BATCH["labels"].int()},
            "the batch has int32 [4, 8] for document_ids",
        ),
        ({**BATCH, "padding": MASK}, "the batch has int64 [4, 8] for padding"),
        (
            {**BATCH, "indices": torch.arange(3)},
            "the batch has int64 [3] for indices, and 4 rows",
        ),
    ],
)
def test_batches_that_would_be_misread_are_refused(model: Any, batch: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        threefold.TrainStep(model)(batch)
    assert what(error) == said or (said.endswith("has ") and " among its " in what(error))


def test_batches_that_are_right_pass(model: Any) -> None:
    step = threefold.TrainStep(model, lr=0.0)
    plain = step(BATCH)
    assert step({**BATCH, "attention_mask": MASK, "position_ids": None}) == plain
    assert step({**BATCH, "padding": MASK == 0, "indices": torch.arange(4)}) == plain
    same = torch.full((2, 8), 5)
    # Shifted or not: there is no difference.
    assert math.isfinite(step({"input_ids": same, "labels": same}).loss)
    # The fix of the refusal of masks, as it is printed.
    batch = {
        **BATCH,
        "attention_mask": HOLES,
        "labels": BATCH["labels"].where(HOLES == 1, -100),
    }
    batch["document_ids"] = batch.pop("attention_mask") - 1
    left_padded = step(batch).loss
    alone = step({name: rows[:, 3:] for name, rows in BATCH.items()}).loss
    assert left_padded == pytest.approx(alone, abs=1e-6)


def loss_giving(answer: Any) -> Any:
    return lambda outputs, batch: answer(outputs)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x.mean(), "the loss gave a tensor [] of float32"),
        (lambda x: (x.mean(-1), 4), "the loss gave a tensor [4, 8] of float32 as its sum"),
        (lambda x: (x.sum().item(), 4), "the loss gave "),
        (lambda x: (x.sum(), 4, 5), "the loss gave a tuple of 3"),
        (lambda x: None, "the loss gave a NoneType"),
        (lambda x: (x.sum(), "4"), "the loss gave a str as its count"),
        (lambda x: (x.sum(), -1), "the loss gave -1 as its count"),
        (lambda x: (x.sum(), math.nan), "the loss gave nan as its count"),
        (lambda x: (x.sum(), x[0, 0]), "the loss gave a tensor [67] of float32 as its count"),
        (lambda x: (x.sum().long(), 4), "the loss gave a tensor [] of int64 as its sum"),
    ],
)
def test_a_loss_must_give_a_sum_and_a_count(model: Any, answer: Any, said: str) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError) as error:
        threefold.TrainStep(model, loss=loss_giving(answer))(BATCH)
    assert what(error).startswith(said)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_not_a_number_updates_nothing(model: Any) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1)):
        step = threefold.TrainStep(
            model, optimizer, loss=loss_giving(lambda x: (x.sum() * math.nan, 4))
        )
        numbers = step(BATCH)
        assert math.isnan(numbers.loss) and math.isnan(numbers.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "answer", [lambda x: (x.sum(), 0), lambda x: (0.0 * x.sum(), torch.zeros(()))]
)
def test_a_mean_of_nothing_is_refused_and_updates_nothing(model: Any, answer: Any) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(DataError, match="the global batch has no token that is trained on"):
            threefold.TrainStep(model, optimizer, loss=loss_giving(answer))(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_negative_count_on_the_device_is_refused_after_it_is_known(model: Any) -> None:
    with pytest.raises(RunError, match=r"the loss has the count -4.0 over all ranks"):
        threefold.TrainStep(
            model, loss=lambda outputs, batch: (outputs.sum(), torch.tensor(-4.0))
        )(BATCH)


def test_settings_that_are_wrong_or_have_no_effect(model: Any, mesh: Any) -> None:
    own = threefold.load_model(nn.Linear(3, 2), mesh=mesh)

    def loss(outputs: Any, batch: Any) -> Any:
        return outputs.sum(), 4

    def declared(together: Any) -> Any:
        def declaring(outputs: Any, batch: Any) -> Any:
            return outputs.sum(), 4

        declaring.rows_together = together  # type: ignore[attr-defined]
        return lambda: threefold.TrainStep(model, loss=declaring)

    mixed = threefold.load_model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), mesh=mesh)
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    cases = [
        (lambda: threefold.TrainStep(nn.Linear(2, 2)), "model is a Linear"),
        (lambda: threefold.TrainStep(own), "a Linear has no built-in loss"),
        (lambda: threefold.EvalStep(own), "a Linear has no built-in loss"),
        (
            lambda: threefold.TrainStep(model, others),
            "the optimizer has 2 parameters that are not the model's, which ",
        ),
        (lambda: threefold.TrainStep(model, "adamw"), "the optimizer is a str"),
        (lambda: threefold.TrainStep(model, grad_clip=-1.0), "grad_clip = -1.0"),
        (lambda: threefold.TrainStep(model, lr=-1.0), "lr = -1.0"),
        (lambda: threefold.TrainStep(model, weight_decay=math.nan), "weight_decay = nan"),
        (lambda: threefold.TrainStep(model, micro_batch=0), "micro_batch = 0"),
        (lambda: threefold.TrainStep(model, loss=loss, loss_on="states"), "loss_on = 'states'"),
        (declared(0), "loss.rows_together = 0"),
        (declared("2"), "loss.rows_together = '2'"),
        (declared(True), "loss.rows_together = True"),
        (declared(None), "loss.rows_together = None"),
        (declared([2]), "loss.rows_together is a list"),
        (
            lambda: threefold.TrainStep(own, loss=loss, loss_on="hidden_states"),
            "loss_on = 'hidden_states', but Linear",
        ),
        (
            lambda: setattr(threefold.TrainStep(model, mine), "lr", 0.1),
            "step.lr = 0.1, but the optimizer is a custom ",
        ),
        (
            lambda: threefold.TrainStep(model, mine, lr=0.5),
            "TrainStep was given an optimizer and lr = 0.5",
        ),
        (
            lambda: threefold.TrainStep(model, mine, weight_decay=0.1),
            "TrainStep was given an optimizer and weight_decay = 0.1",
        ),
        (
            lambda: threefold.TrainStep(mixed, loss=loss, micro_batch=2),
            "micro_batch = 2, but BatchNorm1d '1' mixes the rows of a micro-batch",
        ),
        (
            lambda: torch.no_grad()(threefold.TrainStep(model))(BATCH),
            "the step runs under torch.no_grad()",
        ),
        (
            lambda: threefold.freeze(model, ["none"]),
            "freeze: no parameter has a name that 'none' matches",
        ),
        (
            lambda: threefold.TrainStep(own, loss=loss)({"pixels": torch.ones(4, 3)}),
            "the batch has 'pixels'; Linear.",
        ),
        (
            lambda: threefold.load_model(nn.Linear(3, 2), mesh=mesh, seq_len=8),
            "load_model was given a module and seq",
        ),
        (
            lambda: threefold.load_model(nn.Linear(3, 2).half(), mesh=mesh),
            "the parameter weight of a Linear is float16",
        ),
        (lambda: model(labels=IDS), "the model is called with labels"),
        (lambda: model(position_ids=IDS), "the model is called without input_ids"),
        (
            lambda: model(input_ids=IDS, attention_mask=IDS),
            "the model is called with attention_mask",
        ),
        (lambda: own.save_pretrained("x"), "save_pretrained: a Linear is a custom module"),
        (lambda: own.generate(IDS), "generate: a Linear is a custom module"),
        (
            lambda: threefold.TrainStep(model).load_state_dict({"lr": 1}),
            "this is not the state of a TrainStep like this one: it has ",
        ),
    ]
    for do, said in cases:
        with pytest.raises(ConfigError) as error:
            do()
        assert what(error).startswith(said)


@pytest.mark.parametrize(
    ("kind", "given", "shared"), [("qwen2", {}, 32), ("llama", {"num_key_value_heads": 3}, 3)]
)
def test_key_value_heads_that_query_heads_do_not_share_are_refused(
    kind: str, given: dict[str, int], shared: int, mesh: Any
) -> None:
    """Those of qwen2 are 32 where none are given."""
    config = {key: value for key, value in TINY_LLAMA.items() if key != "num_key_value_heads"}
    config |= {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, **given}
    with pytest.raises(ConfigError) as error:
        threefold.load_model(config=config, mesh=mesh, admission="off")
    (problem,) = error.value.problems
    fix = math.gcd(4, shared)
    assert str(problem) == (
        f"num_key_value_heads = {shared} does not divide the 4 attention heads of {kind!r}\n"
        "  expected: a group of query heads, of equal size, for each key-value head\n"
        f"  fix: 'num_key_value_heads': {fix}   in the model's config"
    )
    mended = threefold.load_model(
        config={**config, "num_key_value_heads": fix}, mesh=mesh, admission="off"
    )
    assert math.isfinite(threefold.TrainStep(mended)(BATCH).loss)


def _after_close() -> list[str]:
    mesh = threefold.init_mesh()
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step, evaluate = threefold.TrainStep(model), threefold.EvalStep(model)
    step(BATCH)
    mesh.close()
    messages = []
    for call in (
        lambda: step(BATCH),
        lambda: evaluate([BATCH]),
        lambda: model.generate(IDS, max_new_tokens=1),
        lambda: threefold.save("never", model=model, step=1),
    ):
        with pytest.raises(RunError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_mesh_that_is_closed_makes_no_step() -> None:
    for messages in run_ranks(_after_close, 2):
        assert set(messages) == {
            "the mesh is closed: no step, call or save can be made on it\n"
            "  expected: mesh.close() as the last line: it has disconnected the ranks\n"
            "  fix: mesh = threefold.init_mesh(...), and the model and its step made on that mesh"
        }
    assert not Path("never").exists()


def test_a_loss_without_a_gradient_is_refused(mesh: Any) -> None:
    own = threefold.load_model(nn.Linear(3, 2), mesh=mesh)
    own.module.forward = torch.no_grad()(lambda input: nn.Linear.forward(own.module, input))
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        threefold.TrainStep(own, loss=lambda outputs, batch: (outputs.sum(), 4))(
            {"input": torch.ones(4, 3)}
        )


def test_the_state_of_a_step_goes_into_another(model: Any) -> None:
    step = threefold.TrainStep(model, lr=0.0)
    step(BATCH)
    other = threefold.TrainStep(model, lr=0.5)
    other.load_state_dict(step.state_dict())
    assert other.lr == 0.0
    assert (
        other.optimizer.state_dict()["state"].keys()
        == step.optimizer.state_dict()["state"].keys()
    )


def test_a_scheduler_of_torch_sets_the_rates_of_a_step(model: Any) -> None:
    step = threefold.TrainStep(model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.1)
    rates = []
    for _ in range(3):
        step(BATCH)
        rates += [step.lr, *{group["lr"] for group in step.optimizer.param_groups}]
        scheduler.step()
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    step.lr = 0.5
    assert {group["lr"] for group in step.optimizer.param_groups} == {0.5}


def test_batches_of_other_lengths_make_one_step(model: Any) -> None:
    padded = {"input_ids": IDS[:, :-1].clone(), "labels": IDS[:, 1:].clone()}
    padded["labels"][2:, 5:] = -100
    short = {name: rows[2:, :5] for name, rows in BATCH.items()}
    whole, parts = (
        threefold.TrainStep(model, lr=0.0)(given)
        for given in (padded, [{name: rows[:2] for name, rows in BATCH.items()}, short])
    )
    assert tuple(parts) == pytest.approx(tuple(whole), rel=1e-5)


def test_a_backward_through_a_call_is_refused(model: Any, mesh: Any) -> None:
    own = threefold.load_model(nn.Linear(3, 2), mesh=mesh)
    for outputs in (model(input_ids=IDS), own(torch.ones(4, 3))):
        with pytest.raises(RunError, match="backward through what model"):
            outputs.sum().backward()
    assert all(each.grad is None for each in (*model.parameters(), *own.parameters()))


def test_a_step_that_failed_leaves_no_gradient_to_the_next(model: Any) -> None:
    def loss(logits: Any, batch: Any) -> Any:
        if (batch["row"] == 3).any():
            raise MemoryError
        return logits.square().sum(), 4

    step = threefold.TrainStep(model, loss=loss, lr=0.0, micro_batch=2)
    norm = step({**BATCH, "row": torch.zeros(4)}).grad_norm
    with pytest.raises(MemoryError):
        step({**BATCH, "row": torch.arange(4)})
    assert step({**BATCH, "row": torch.zeros(4)}).grad_norm == norm


def test_an_evaluation_does_not_count_a_row_that_its_sampler_repeats(model: Any) -> None:
    rows = [{name: each[0] for name, each in BATCH.items()}] * 5
    evaluate = threefold.EvalStep(model)
    for kind in (threefold.DistributedSampler, torch.utils.data.DistributedSampler):
        for size, refused in ((5, True), (4, False)):
            sampler = kind(rows[:size], 2, 0)
            loader = torch.utils.data.DataLoader(rows[:size], sampler=sampler)
            if not refused:
                assert evaluate(loader).num_counted == 2 * BATCH["labels"].shape[1]
                continue
            with pytest.raises(DataError) as error:
                evaluate(loader)
            assert what(error).startswith("the evaluation would count 1 rows twice")
    exact = threefold.DistributedSampler(rows, 2, 0, tail="exact")
    loader = torch.utils.data.DataLoader(rows, sampler=exact)
    assert evaluate(loader).num_counted == 3 * BATCH["labels"].shape[1]


def test_what_a_program_meets_is_public() -> None:
    for name in threefold.__all__:
        assert getattr(threefold, name) is not None
    assert issubclass(threefold.errors.ConfigError, threefold.errors.ThreefoldError)


def test_saves_that_cannot_be_kept_are_refused(model: Any, tmp_path: Path) -> None:
    counting = torch.optim.SGD(model.parameters(), lr=0.1)
    counting.state[next(model.module.parameters())]["steps"] = 3
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": model.module}, "model is a LlamaForCausalLM"),
        ({"step": -1}, "step = -1"),
        ({"keep": 0}, "keep = 0"),
        ({"extra": {"best": torch.ones(2)}}, "extra.best is a Tensor"),
        ({"extra": {"rates": [{"at": Counter({3: 1})}]}}, "extra.rates.at is a Counter"),
        ({"extra": {1: 2}}, "extra is a dict"),
        ({"loader": [1, 2]}, "loader is a list"),
        (
            {"optimizer": counting},
            "the optimizer SGD has a state that cannot be kept: steps of model.embed_tokens.weight is not a tensor but "
            "3",
        ),
    ]
    for given, said in cases:
        with pytest.raises(ConfigError) as error:
            threefold.save(tmp_path, **{"model": model, "step": 1, **given})
        assert what(error) == said
    assert list(tmp_path.iterdir()) == []


def test_damaged_torn_and_foreign_saves_are_refused(
    model: Any, mesh: Any, tmp_path: Path
) -> None:
    assert threefold.load(tmp_path, model=model) is None
    step = threefold.TrainStep(model)
    path = threefold.save(tmp_path, model=model, step=1, optimizer=step, wait=False).wait()
    assert threefold.load(tmp_path, model=model, optimizer=step) == threefold.load(
        path, model=model
    )
    bare = threefold.save(tmp_path / "bare", model=model, step=1).path
    with pytest.raises(CheckpointError) as without:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        threefold.load(bare, model=model, optimizer=sgd)
    assert str(without.value) == (
        f"{bare} was saved without an optimizer\n"
        "  expected: its moments, without which this one would start over\n"
        "  fix: load without optimizer=   (and from now on threefold.save(..., optimizer=optimizer))"
    )
    with pytest.raises(ThreefoldError, match="has no loader position"):
        threefold.load(
            path,
            model=model,
            loader=threefold.DistributedSampler(range(8), num_replicas=1, rank=0),
        )
    smaller = threefold.load_model(
        config={**TINY_LLAMA, "num_hidden_layers": 1}, mesh=mesh, admission="off"
    )
    with pytest.raises(CheckpointError, match="num_hidden_layers = 2, this run 1"):
        threefold.load(path, model=smaller)
    own = threefold.load_model(nn.Linear(3, 2), mesh=mesh)
    with pytest.raises(CheckpointError, match=r"the checkpoint has nothing for model.weight"):
        threefold.load(path, model=own)
    file = next((path / "state").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        CheckpointError,
        match=r"is damaged: the content of state/rank-00000.safetensors has changed",
    ):
        threefold.load(tmp_path, model=model)
    file.write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "loop": {}}))
    with pytest.raises(CheckpointError, match="the marker was written for another manifest"):
        threefold.load(tmp_path, model=model)
    (path / "COMPLETE").unlink()
    with pytest.raises(
        CheckpointError, match="is not complete, and there is no other checkpoint"
    ):
        threefold.load(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def _on_tp_ranks() -> list[str]:
    mesh = threefold.init_mesh(tp=2)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    said = []
    own = BATCH if mesh.rank else {name: rows.roll(1, 0) for name, rows in BATCH.items()}
    cases: list[Any] = [
        lambda: threefold.TrainStep(
            model, loss=lambda x, batch: (x.sum() * (1 + mesh.rank), 4)
        )(BATCH),
        lambda: threefold.TrainStep(model)(own),
        lambda: threefold.TrainStep(model, micro_batch=1 + mesh.rank)(BATCH),
        lambda: threefold.TrainStep(model)(BATCH if mesh.rank else {"input_ids": IDS}),
    ]
    for do in cases:
        with pytest.raises(ThreefoldError) as error:
            do()
        said.append(str(error.value).splitlines()[0])
    assert math.isfinite(threefold.TrainStep(model)(BATCH).loss)
    mesh.close()
    return said


def test_ranks_that_disagree_are_told_on_all_of_them() -> None:
    for said in run_ranks(_on_tp_ranks, 2):
        assert said[0].startswith("tp ranks compute different losses from the same outputs: ")
        assert (
            said[1]
            == "ranks 0 and 1 belong to dp rank 0 and give different rows to step 1: row 0 of input_ids"
        )
        assert (
            said[2]
            == "the batch of step 1 is split into 2 micro-batches on rank 1, into 4 on rank 0"
        )
        assert said[3] == "the batch has no labels"


def _rows_of_cp() -> str:
    mesh = threefold.init_mesh(cp=2)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    with pytest.raises(ConfigError) as error:
        threefold.TrainStep(model)({"input_ids": IDS[:, :6], "labels": IDS[:, 1:7]})
    with pytest.raises(ConfigError, match="rows of 6 tokens"):
        model(input_ids=IDS[:, :6])
    mean = threefold.TrainStep(model, loss=lambda logits, batch: (logits.mean(), 1))
    with pytest.raises(ConfigError, match=r"^the loss gave 1 as its count for each of 2 micro"):
        mean({"input_ids": IDS[:, :4]})
    mesh.close()
    return str(error.value)


def test_rows_that_cp_cannot_split_and_means_are_refused() -> None:
    assert run_ranks(_rows_of_cp, 2)[0] == (
        "the batch has rows of 6 tokens\n"
        "  expected: a multiple of 4 on dp=1 x cp=2 x tp=1: each cp rank takes two equal chunks\n"
        "  fix: pad the rows to 8 tokens, with labels of -100"
    )


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        (
            {"name": "adam"},
            "optimizer.name = adam is not an optimizer",
            "threefold.optimizer('adamw', model)",
        ),
        (
            {"name": "muon", "beta": [0.9, 0.9]},
            "threefold.optimizer('muon', ...) has beta = [0.9, 0.9]",
            "did you mean betas?",
        ),
        (
            {"name": "sgd", "momentum": 0.9},
            "threefold.optimizer('sgd', ...) has momentum = 0.9",
            "options={'momentum': 0.9}, if its class takes momentum",
        ),
        (
            {"name": "adamw", "betas": [0.9, 1.5]},
            "optimizer.betas[1] = 1.5 is not a decay",
            "threefold.optimizer(..., betas=[0.9, 0.95])",
        ),
        (
            {"name": "adamw", "lr": -1.0},
            "optimizer.lr = -1.0 is not accepted",
            "threefold.optimizer(..., lr='auto')   (the default)",
        ),
        (
            {"name": "sgd", "options": {"lr": 0.1}},
            "optimizer.options has lr, which is a separate key",
            "threefold.optimizer(..., lr=0.1), and leave it out of optimizer.options",
        ),
        (
            {"name": "sgd", "options": {"momentun": 0.9}},
            "optimizer.options has momentun, which SGD does not take",
            "did you mean momentum?",
        ),
        (
            {"name": "torch.optim.NAdan"},
            "optimizer.name = torch.optim.NAdan is not there",
            "threefold.optimizer('torch.optim.NAdam', model)",
        ),
        (
            {"name": "torch.optim.LBFGS"},
            "torch.optim.LBFGS re-evaluates the loss in each step",
            "threefold.optimizer('adamw', model)",
        ),
        (
            {"name": "muon", "groups": [{"match": "embedd_tokens", "lr": 1e-4}]},
            "optimizer.groups[0].match = embedd_tokens matches no parameter that is trained",
            "a pattern of their names: model.embed_tokens.weight",
        ),
        (
            {"name": "muon", "groups": [{"match": "embed"}]},
            "optimizer.groups[0] has neither lr nor weight_decay: it changes nothing",
            "threefold.optimizer(..., groups=[{'match': 'embed', 'lr': 0.0001}])",
        ),
        (
            {"name": "muon", "warmup_steps": 10},
            "threefold.optimizer('muon', ...) has warmup_steps = 10",
            "leave warmup_steps out; torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000), for example",
        ),
        (
            {"name": "muon", "ema": 0.99},
            "threefold.optimizer('muon', ...) has ema = 0.99",
            "leave ema out; average the weights in the loop",
        ),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_named_optimizer_is_refused_in_the_words_of_a_program(
    model: Any, settings: dict[str, Any], said: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        threefold.optimizer(model=model, **settings)
    (problem,) = refused.value.problems
    assert problem.what == said and problem.fix.startswith(fix) and " --" not in problem.fix
    if problem.fix.startswith("threefold.optimizer('"):
        eval(problem.fix, {"threefold": threefold, "model": model})


def test_a_named_optimizer_is_of_a_model_on_the_mesh() -> None:
    with pytest.raises(ConfigError) as refused:
        threefold.optimizer("muon", nn.Linear(2, 2))  # type: ignore[arg-type]
    assert what(refused) == "model is a Linear"


def test_a_named_optimizer_has_the_rate_of_the_weights_and_of_its_groups(model: Any) -> None:
    made = threefold.optimizer("adafactor", model, groups=[{"match": "norm", "lr": 1e-3}])
    rates = {group["params"][0].ndim: group["lr"] for group in made.param_groups}
    assert rates == {2: model.automatic_rate, 1: 1e-3} and model.automatic_rate == 2e-3
