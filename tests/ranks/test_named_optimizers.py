"""An optimizer by its name in a custom loop: its steps are those of `threefold train`, bit for bit, and it is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import compare_curves, require
from ranks.runs import command, curve, prepare
from ranks.spawn import run_ranks
from threefold.check.compare import Bound, compare_tensors
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.state import index_of
from threefold.checkpoint.tensors import read_whole

pytestmark = pytest.mark.ranks

STEPS, SAVED = 4, 2
GROUPS = [
    {"match": "embed", "lr": 1e-4, "name": "slow"},
    {"match": "norm", "weight_decay": 1.0},
]
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"betas": [0.8, 0.9], "eps": 1e-6, "groups": GROUPS, "lr": 3e-3},
    "adamw, narrow": {"moments": "bfloat16"},
    "adamw_8bit": {},
    "muon": {"groups": GROUPS, "lr": 1e-3},
    "adafactor": {"options": {"d": 2.0}},
    "sgd": {"options": {"momentum": 0.9}, "weight_decay": 0.01},
}
# Of fewer than 4,096 values, moments are not kept in 8 bits.
LARGE = "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 4}"
SAME = Bound("weight", 0.0, "bit for bit", relative=False)
MESHES: list[dict[str, int]] = [
    {"dp": 2},
    {"dp": 1},
    {"dp": 2, "dp_shard": 2},
    {"dp": 1, "tp": 2},
    {"dp": 1, "cp": 2},
]


def _loop(
    sizes: dict[str, int], folder: str, case: dict[str, Any], first: int, last: int
) -> Any:
    """(loss, gradient norm) of steps over the rows of the run in a folder, its rate, and the weights afterwards."""
    import threefold
    from threefold.config.loading import load
    from threefold.run import assemble, request

    mesh = threefold.init_mesh(**sizes)
    config = load(f"{folder}/run/config.yaml", environ={}).config
    tokenizer = request.tokenizer_of(config)
    loader = assemble.loader_of(config, assemble.rows_of(config, tokenizer, mesh), mesh)
    described = {**(config.model.config or {}), "vocab_size": tokenizer.vocab_size}
    model = threefold.load_model(
        config=described, mesh=mesh, seed=config.train.seed, admission="off"
    )
    optimizer = threefold.optimizer(**case, model=model)
    step = threefold.TrainStep(model, optimizer, micro_batch=2)
    if first > 1:
        loaded = threefold.load(f"{folder}/loop", model=model, optimizer=step)
        assert loaded is not None and loaded.step == first - 1
    numbers = []
    for number, batch in zip(range(1, last + 1), loader, strict=False):
        if number < first:
            continue
        numbers.append(tuple(step(batch)))
        if number == SAVED:
            threefold.save(f"{folder}/loop", model=model, step=number, optimizer=step)
    weights = {
        name: getattr(each, "full_tensor", lambda each=each: each)()
        for name, each in model.named_parameters()
    }
    plain = {name: each.detach().numpy().copy() for name, each in weights.items()}
    mesh.close()
    return (
        numbers,
        {group.get("label", ""): group["lr"] for group in optimizer.param_groups},
        plain,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "sizes",
    [MESHES[0], *(pytest.param(e, marks=pytest.mark.examples) for e in MESHES[1:])],
    ids=str,
)
def test_steps_are_those_of_a_run_and_continue_from_a_checkpoint(
    sizes: dict[str, int], name: str, tmp_path: Path
) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="torchao is not installed")
        if {"tp", "cp", "dp_shard"} & sizes.keys():
            pytest.skip("it is refused where matrices are split")
    prepare(tmp_path)
    case = {"name": name.partition(",")[0], **CASES[name]}
    ranks = math.prod(value for key, value in sizes.items() if key != "dp_shard")
    options = [
        word for key, value in case.items() for word in (f"--optimizer.{key}", _yaml(value))
    ]
    options += ["--model.config", LARGE] if name == "adamw_8bit" else []
    mesh = [word for axis, size in sizes.items() for word in (f"--mesh.{axis}", str(size))]
    shard = [] if "dp_shard" in sizes else ["--mesh.dp_shard", "1"]
    rates = (
        "--optimizer.schedule",
        "constant",
        "--optimizer.warmup_steps",
        "0",
        "--train.micro_batch",
        "2",
    )
    done = command(
        *(tmp_path, "train", "config.yaml", *options, *mesh, *shard, *rates),
        *("--train.steps", str(STEPS), "--log.dir", "run"),
    )
    assert done.returncode == 0, done.stderr
    loop = {"dp_shard": 1, **sizes}
    whole, lr, weights = run_ranks(_loop, ranks, loop, str(tmp_path), case, 1, STEPS)[0]
    assert whole == curve(tmp_path / "run")
    assert lr[""] == CASES[name].get("lr", 2e-3) and lr.get("slow", 1e-4) == pytest.approx(1e-4)
    checkpoint = find(tmp_path / "run")
    index = index_of(checkpoint)
    trained = {
        key: read_whole(checkpoint.state, index.entries[f"model.{key}"]).numpy()
        for key in weights
    }
    require(compare_tensors(SAME, weights, trained))
    again, same, after = run_ranks(_loop, ranks, loop, str(tmp_path), case, SAVED + 1, STEPS)[0]
    assert (again, same) == (whole[SAVED:], lr)
    require(compare_tensors(SAME, after, weights))


def _yaml(value: Any) -> str:
    from threefold.config.yaml_text import as_yaml

    return as_yaml(value)


def test_a_checkpoint_of_copies_continues_on_split_parameters_in_other_groups(
    tmp_path: Path,
) -> None:
    """The groups of a named optimizer are by the mesh of their parameters: their settings are the parameters'."""
    prepare(tmp_path)
    # Under tp, biases of queries are split, and norms are not.
    biased = "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,"
    biased += " num_key_value_heads: 2}"
    one = ("--model.config", biased, "--mesh.dp", "1", "--train.steps", "1", "--log.dir", "run")
    assert command(tmp_path, "train", "config.yaml", *one).returncode == 0
    case = {"name": "muon", **CASES["muon"]}
    whole, lr, _ = run_ranks(_loop, 2, {"dp": 2, "dp_shard": 1}, str(tmp_path), case, 1, STEPS)[
        0
    ]
    split, same, _ = run_ranks(
        _loop, 2, {"dp": 1, "tp": 2}, str(tmp_path), case, SAVED + 1, STEPS
    )[0]
    require(compare_curves(split, whole[SAVED:]))
    assert same == lr and len(same) == 2
