"""Optimizers that are refused, and why: names, options, groups and schedules; all before the first collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from threefold.config import loading
from threefold.config.optimizer import OPTIMIZERS, OptimizerConfig
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.optim.build import group_problems
from threefold.optim.classes import problems

SPLIT, COPIES = Topology(dp_shard=2, tp=2), Topology(dp_replicate=2)


def refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        loading.validate({"optimizer": keys})
    return str(error.value).split("\n")[0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "adam"}, "optimizer.name = adam is not an optimizer"),
        (
            {"name": "sgd", "betas": [0.8, 0.9]},
            "optimizer.betas = [0.8, 0.9] has no effect on optimizer.name = sgd",
        ),
        (
            {"name": "adafactor", "eps": 1e-3},
            "optimizer.eps = 0.001 has no effect on optimizer.name = adafactor",
        ),
        ({"options": {"lr": 1}}, "optimizer.options has lr, which is a separate key"),
        ({"options": [1]}, "optimizer.options = [1] is not accepted"),
        (
            {"name": "sgd", "moments": "bfloat16"},
            "optimizer.moments = bfloat16 with optimizer.name = sgd",
        ),
        (
            {"moments": "bfloat16", "options": {"amsgrad": True}},
            "optimizer.moments = bfloat16 with optimizer.name = adamw with optimizer.options",
        ),
        (
            {"moments": "bfloat16", "betas": [0.9, 0.999]},
            "optimizer.moments = bfloat16 with optimizer.betas = [0.9, 0.999]",
        ),
        ({"schedule": "wsd"}, "optimizer.schedule = wsd without optimizer.decay_steps"),
        (
            {"decay_steps": 3},
            "optimizer.decay_steps = 3 has no effect with optimizer.schedule = cosine",
        ),
        (
            {"decay_shape": "1-sqrt"},
            "optimizer.decay_shape = 1-sqrt has no effect with optimizer.schedule = cosine",
        ),
        (
            {"schedule": "inverse_sqrt", "min_lr": 1e-9},
            "optimizer.min_lr = 1e-09 has no effect with optimizer.schedule = inverse_sqrt",
        ),
        ({"groups": 3}, "optimizer.groups = 3 is not accepted"),
        ({"groups": [3]}, "optimizer.groups[0] = 3 is not accepted"),
        ({"groups": [{"lr": 1.0}]}, "there is no optimizer.groups[0].match"),
        ({"groups": [{"match": "a", "lrr": 1.0}]}, "unknown key optimizer.groups[0].lrr"),
        ({"groups": [{"match": "a", "lr": "x"}]}, "optimizer.groups[0].lr = x is not accepted"),
        (
            {"groups": [{"match": "a"}]},
            "optimizer.groups[0] has neither lr nor weight_decay: it changes nothing",
        ),
        (
            {"groups": [{"match": "a", "lr": 1.0, "name": "a b"}]},
            "optimizer.groups[0].name = a b",
        ),
        (
            {"groups": [{"match": "a", "lr": 1.0, "name": "a"}] * 2},
            "optimizer.groups has the name a 2 times",
        ),
        (
            {"groups": [{"match": "(", "lr": 1.0}]},
            "optimizer.groups[0].match = ( is not a regular expression: "
            "missing ), unterminated subpattern at position 0",
        ),
    ],
)
def test_values_that_contradict(keys: dict[str, Any], said: str) -> None:
    assert refused(**keys) == said


def test_a_fall_that_is_longer_than_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer.decay_steps = 10, but the run has train.steps = 10"
    ):
        loading.validate(
            {"train": {"steps": 10}, "optimizer": {"schedule": "wsd", "decay_steps": 10}}
        )


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "nowhere.X",
            {},
            "optimizer.name = nowhere.X: there is no installed package 'nowhere'",
        ),
        ("os.path", {}, "optimizer.name = os.path: there is no installed package 'os'"),
        (
            "torch.nothing.X",
            {},
            "optimizer.name = torch.nothing.X: ModuleNotFoundError: No module named 'torch.nothing'",
        ),
        ("torch.optim.Nadam", {}, "optimizer.name = torch.optim.Nadam is not there"),
        (
            "torch.nn.Linear",
            {},
            "optimizer.name = torch.nn.Linear is not an optimizer class",
        ),
        (
            "torch.optim.Optimizer",
            {},
            "optimizer.name = torch.optim.Optimizer is not an optimizer class",
        ),
        ("torch.optim.LBFGS", {}, "torch.optim.LBFGS re-evaluates the loss in each step"),
        (
            "torch.optim.Adafactor",
            {},
            "torch.optim.Adafactor does not update a part of a matrix as it updates the whole, "
            "and this mesh holds parts",
        ),
        ("sgd", {"momentun": 0.9}, "optimizer.options has momentun, which SGD does not take"),
        ("adamw", {"fused": False}, "optimizer.options has fused, which the run sets"),
        ("muon", {"mesh": 1}, "optimizer.options has mesh, which the run sets"),
        (
            "sgd",
            {"momentum": -1},
            "optimizer.name = sgd with optimizer.options = {momentum: -1}: ValueError: Invalid momentum value: -1",
        ),
        (
            "muon",
            {"ns_coefficients": [1.0]},
            "optimizer.name = muon with optimizer.options = {ns_coefficients: [1.0]}: "
            "ValueError: Coefficients must be a tuple of exactly 3 values",
        ),
    ],
)
def test_optimizers_that_cannot_be_used(name: str, options: dict[str, Any], said: str) -> None:
    found = problems(OptimizerConfig(name=name, options=options), SPLIT)
    assert [each.what for each in found] == [said]
    assert all(each.expected and each.fix for each in found)


def test_optimizers_that_can_be_used() -> None:
    torchs = (
        "Adam",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "ASGD",
        "Rprop",
    )
    ours = [name for name, known in OPTIMIZERS.items() if known.splits]
    for name in (*ours, *(f"torch.optim.{each}" for each in torchs)):
        assert problems(OptimizerConfig(name=name), SPLIT) == [], name
    # Copies of a model may be updated by any optimizer whose update is the same on each.
    assert problems(OptimizerConfig(name="torch.optim.Adafactor"), COPIES) == []


@pytest.mark.parametrize("name", ["adamw_8bit", "torch.optim.Adafactor"])
def test_fix_for_an_optimizer_of_whole_matrices_keeps_the_number_of_ranks(name: str) -> None:
    (problem,) = problems(OptimizerConfig(name=name), SPLIT)
    kept = f"--mesh.dp {SPLIT.world_size} --mesh.dp_shard 1 --mesh.cp 1 --mesh.tp 1"
    assert kept in problem.fix
    assert problems(OptimizerConfig(name=name), Topology(dp_replicate=SPLIT.world_size)) == []


class _Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step()


class _Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()


class _InGroups(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["momentum"] += 0.1
        super().step()


class _Numbers(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["age"] = 3


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_Noisy, "gives a different update when called again: it draws random numbers"),
        (_Counting, "changes steps in its step, outside its state"),
        (_InGroups, "changes momentum in its step, outside its state"),
        (_Numbers, "keeps a int as age"),
    ],
)
def test_optimizers_that_could_not_go_on(
    kind: type, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "Planted", kind, raising=False)
    found = problems(OptimizerConfig(name="torch.optim.Planted"), COPIES)
    assert [each.what for each in found] == [f"torch.optim.Planted {said}"]


def test_patterns_that_match_nothing() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(3, 2), "layers": nn.ModuleList([nn.Linear(2, 2)])}
    )
    names = [name for name, _ in model.named_parameters()]
    given = [
        {"match": "embde", "lr": 1.0},
        {"match": "embed", "lr": 1.0},
        {"match": r"embed\.weight", "lr": 1.0},
    ]
    config = loading.validate({"optimizer": {"groups": given}}).optimizer
    found = [(each.what, each.fix) for each in group_problems(names, config)]
    assert found == [
        (
            "optimizer.groups[0].match = embde matches no parameter that is trained",
            "a pattern of their names: embed.weight",
        ),
        (
            r"optimizer.groups[2].match = embed\.weight matches only parameters that the groups before it take",
            "a pattern of their names: embed.weight, layers.0.weight",
        ),
    ]
