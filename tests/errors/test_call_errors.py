"""Arguments of public functions that are of another kind: one error in three parts each, which names the argument."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig

import threefold
from ranks.reference import TINY_LLAMA
from threefold.errors import ConfigError, DataError, ThreefoldError

IDS = torch.arange(8).reshape(2, 4)
BATCH = {"input_ids": IDS, "labels": IDS.roll(-1, 1)}
ROWS = TensorDataset(torch.arange(12))


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


Call = Callable[[Any, Any], object]
MODULE = nn.Linear(2, 2)
PLAIN = "model is a Linear"
AS_MODEL = "model = threefold.load_model(..., mesh=mesh), which also takes an nn.Module"


def scheduler() -> Any:
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(MODULE.parameters()), lambda _: 1)


def load(mesh: Any, **arguments: Any) -> Any:
    return threefold.load_model(**{"config": TINY_LLAMA, "mesh": mesh, **arguments})


CASES: list[tuple[Call, str, str]] = [
    (lambda model, _: threefold.TrainStep(MODULE), PLAIN, AS_MODEL),
    (lambda model, _: threefold.EvalStep(MODULE), PLAIN, AS_MODEL),
    (lambda model, _: threefold.save("folder", model=MODULE, step=1), PLAIN, AS_MODEL),
    (lambda model, _: threefold.load("folder", model=MODULE), PLAIN, AS_MODEL),
    (lambda model, _: threefold.freeze(MODULE, ["weight"]), PLAIN, AS_MODEL),
    (lambda model, _: threefold.optimizer("adamw", MODULE), PLAIN, AS_MODEL),
    (
        lambda model, _: threefold.TrainStep(model, loss="ce"),
        "loss = 'ce'",
        "loss=lambda outputs, batch: (losses.sum(), losses.numel())",
    ),
    (
        lambda model, _: threefold.EvalStep(model)({"input_ids": torch.ones(1, 2).long()}),
        "batches is a dict",
        "evaluate([batch]), or evaluate(loader)",
    ),
    (
        lambda model, _: threefold.EvalStep(model)(None),
        "batches = None",
        "evaluate([batch]), or evaluate(loader)",
    ),
    (
        lambda model, _: threefold.freeze(model, ["("]),
        "freeze: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
        r"freeze(model, ['\\('])",
    ),
    (
        lambda model, _: threefold.save("", model=model, step=1),
        "folder = ''",
        "folder='my-loop'",
    ),
    (lambda model, _: threefold.load(None, model=model), "folder = None", "folder='my-loop'"),
    (
        lambda model, _: threefold.save("folder", model=model, step=1, optimizer=scheduler()),
        "optimizer is a LambdaLR",
        "optimizer=step",
    ),
    (
        lambda model, _: threefold.save("folder", model=model, step=1, extra=[1]),
        "extra is a list",
        "extra={'best_loss': 2.5}",
    ),
    (
        lambda model, mesh: load(mesh, name_or_path=LlamaConfig(), config=None),
        "name_or_path is a LlamaConfig",
        "threefold.load_model(config=config, mesh=mesh)",
    ),
    (lambda model, _: load(None), "mesh = None", "mesh=threefold.init_mesh()"),
    (lambda model, mesh: load(mesh, lora=8), "lora = 8", "lora={'r': 8}"),
    (
        lambda model, mesh: load(mesh, lora={"r": "x"}),
        "model.lora.r = x is not accepted",
        "threefold.load_model(..., lora={'r': 0})   (the default)",
    ),
    (
        lambda model, mesh: load(mesh, seed="x"),
        "train.seed = x is not accepted",
        "threefold.load_model(..., seed=0)   (the default)",
    ),
    (
        lambda model, mesh: load(mesh, dtype=torch.float16),
        "model.dtype = float16 is not accepted",
        "threefold.load_model(..., dtype='bfloat16')   (float16 is not supported)",
    ),
    (
        lambda *_: threefold.init_mesh("2"),
        'mesh.dp = "2" is not accepted',
        "threefold.init_mesh(dp=2)",
    ),
    (
        lambda *_: threefold.init_mesh(device="cud"),
        "mesh.device = cud is not accepted",
        "threefold.init_mesh(device='cuda')",
    ),
    (
        lambda *_: threefold.init_mesh(timeout_s=-1),
        "mesh.timeout_s = -1 is not accepted",
        "threefold.init_mesh(timeout_s=600.0)   (the default)",
    ),
    (lambda *_: threefold.Run(5), "folder = 5", "folder='runs/my-run'"),
    (lambda *_: threefold.Run("run", config=5), "config = 5", "config={'log.stall_s': 300}"),
    (lambda *_: threefold.Run("run", mesh="x"), "mesh = 'x'", "mesh=threefold.init_mesh()"),
    (
        lambda model, mesh: in_run(mesh, lambda run: run.load(model)),
        "step is a Model",
        "run.load(threefold.TrainStep(model), loader)",
    ),
    (
        lambda model, mesh: in_run(
            mesh, lambda run: run.load(threefold.TrainStep(model), schedule=5)
        ),
        "schedule = 5",
        "leave schedule out",
    ),
    (
        lambda model, mesh: in_run(mesh, lambda run: with_milestones(run, model)),
        "schedule.milestones is a Counter",
        "leave constructor arguments out of a state (the milestones of MultiStepLR); save tensors with the model, as "
        "buffers, and plain values of other objects",
    ),
    (
        lambda model, mesh: in_run(
            mesh,
            lambda run: (
                run.load(threefold.TrainStep(model)),
                [*run.steps([BATCH], until="2")],
            ),
        ),
        "until = '2'",
        "until=1000",
    ),
    (
        lambda model, mesh: logged(mesh, model, {"accuracy": 0.5}),
        "numbers is a dict",
        "run.log(numbers, accuracy=0.5)",
    ),
    (
        lambda model, mesh: logged(mesh, model, loss=0.5),
        "loss = 0.5",
        "run.log(numbers, my_loss=0.5)",
    ),
    (
        lambda model, mesh: logged(mesh, model, seen=torch.ones(2)),
        "seen is a Tensor",
        "run.log(numbers, my_seen=0.5)",
    ),
    (
        lambda model, _: model.generate([[1, 2]]),
        "input_ids is a list",
        "model.generate(tokenizer(prompts, return_tensors='pt')['input_ids'])",
    ),
    (
        lambda model, _: model.generate(torch.tensor([[1, 67]])),
        "the batch has 67 among its input_ids",
        "use the tokenizer of the model",
    ),
    (
        lambda model, _: model(torch.tensor([[1, -1]])),
        "the batch has -1 among its input_ids",
        "use the tokenizer of the model",
    ),
    (lambda *_: sampler(2.0, 0), "num_replicas = 2.0", "num_replicas=1"),
    (lambda *_: sampler(0, 0), "num_replicas = 0", "num_replicas=1"),
    (lambda *_: sampler(2, "1"), "rank = '1'", "rank=0"),
    (lambda *_: sampler(seed=None), "seed = None", "seed=0"),
    (lambda *_: sampler().set_epoch(1.5), "epoch = 1.5", "epoch=0"),
    (lambda *_: sampler().set_epoch(-1), "epoch = -1", "epoch=0"),
    (
        lambda *_: sampler(weights=[1.0] * 12, num_samples=3.5),
        "num_samples = 3.5",
        "num_samples=1",
    ),
    (
        lambda *_: sampler().load_state_dict(None),
        "this is not a saved order of samples: it has no epoch",
        "load the state that the same sampler or loader saved, or start a new run",
    ),
]


def in_run(mesh: Any, work: Callable[[Any], object]) -> None:
    with (
        TemporaryDirectory() as folder,
        threefold.Run(folder, mesh=mesh) as run,
    ):
        work(run)


def with_milestones(run: Any, model: Any) -> None:
    step = threefold.TrainStep(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(step.optimizer, [2, 5])
    run.load(step, schedule=schedule)


def logged(mesh: Any, model: Any, numbers: Any = None, **values: Any) -> None:
    def work(run: Any) -> None:
        step = threefold.TrainStep(model)
        run.load(step)
        for batch in run.steps([BATCH], until=1):
            found = step(batch)
            run.log(numbers or found, **values)

    in_run(mesh, work)


def sampler(num_replicas: Any = 2, rank: Any = 0, **settings: Any) -> Any:
    return threefold.DistributedSampler(ROWS, num_replicas, rank, **settings)


@pytest.mark.parametrize(("call", "what", "fix"), CASES, ids=[case[1][:40] for case in CASES])
def test_what_is_wrong_is_named_with_a_call_that_works(
    call: Call, what: str, fix: str, model: Any, mesh: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError)) as refused:
        call(model, mesh)
    error: ThreefoldError = refused.value
    (problem,) = error.problems
    assert (problem.what, problem.fix) == (what, fix) and problem.expected
    assert not list(tmp_path.iterdir())


def test_a_loader_is_not_asked_for_its_state_before_it_is_read(model: Any, mesh: Any) -> None:
    """torchdata's begins a pass to answer: its workers start, and it draws their seed."""

    class Loader:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = Loader()
    in_run(mesh, lambda run: run.load(threefold.TrainStep(model), loader))
    assert not loader.asked


def test_a_config_of_transformers_a_path_and_a_type_of_torch_are_taken(
    mesh: Any, tmp_path: Path
) -> None:
    architecture = LlamaConfig(
        **{key: value for key, value in TINY_LLAMA.items() if key != "model_type"}
    )
    settings: dict[str, Any] = {"mesh": mesh, "admission": "off", "seed": 3}
    one = threefold.load_model(config=architecture, **settings)
    other = threefold.load_model(config=TINY_LLAMA, **settings)
    for (name, values), own in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(values, own), name
    one.save_pretrained(tmp_path / "saved")
    again = threefold.load_model(tmp_path / "saved", dtype=torch.bfloat16, **settings)
    assert again.asked.model.dtype == "bfloat16"


def test_an_error_from_another_process_says_where_it_arose() -> None:
    error = DataError("what", expected="expected", fix="fix")
    error.ranks, error.phase, error.step = (1, 2), "save", 7
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DataError and again.problems == error.problems
    assert (again.ranks, again.phase, again.step) == ((1, 2), "save", 7)
    assert again.__notes__ == ["a note"]
