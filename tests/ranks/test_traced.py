"""A step traced without ranks against the same step on ranks: the bytes that live and the bytes that are sent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ranks.held import held_and_sent
from ranks.runs import command
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

MODEL = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MESHES: list[dict[str, int]] = [
    {},
    {"dp": 2},
    {"dp": 2, "dp_shard": 2},
    {"dp": 4, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]
# Activation checkpointing, and the type.
CASES = [("none", "float32"), ("selective", "bfloat16"), ("full", "bfloat16")]
MICRO_BATCH, NUM_BATCHES = 2, 3


def _config(sizes: dict[str, int], mode: str, dtype: str) -> Any:
    from threefold.config.loading import validate

    rows = MICRO_BATCH * NUM_BATCHES * sizes.get("dp", 1)
    return validate(
        {
            "model": {"config": MODEL, "dtype": dtype},
            "data": {"seq_len": 128},
            "train": {
                "activation_checkpointing": mode,
                "global_batch": rows,
                "micro_batch": MICRO_BATCH,
            },
            "mesh": sizes,
        }
    )


def _ranks(sizes: dict[str, int]) -> int:
    return math.prod(size for axis, size in sizes.items() if axis != "dp_shard")


def on_ranks(
    sizes: dict[str, int], cases: list[tuple[str, str]]
) -> list[tuple[int, dict[str, Any]]]:
    """(peak, what was sent) of one rank for each (mode, type): of a step that is not the first."""
    configs = [_config(sizes, mode, dtype) for mode, dtype in cases]
    return held_and_sent(sizes, configs, rows=MICRO_BATCH, batches=NUM_BATCHES)


def alone(sizes: dict[str, int], cases: list[tuple[str, str]]) -> list[Any]:
    from threefold.mesh.topology import resolve
    from threefold.model import load
    from threefold.run.plan_trace import trace

    found = []
    for mode, dtype in cases:
        config = _config(sizes, mode, dtype)
        topology, _ = resolve(config.mesh, launched_world_size=_ranks(sizes), num_devices=None)
        found.append(trace(config, load.read_config(config.model), topology))
    return found


# Sharded and split in every case, and both in one, are always run, the others with the long cases.
SHORT = [(MESHES[2], CASES), (MESHES[5], CASES), (MESHES[6], CASES[1:2])]
LONG = [(sizes, CASES) for number, sizes in enumerate(MESHES) if number not in (2, 5)]


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [*SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{len(value)} cases",
)
def test_trace_is_what_a_rank_holds_and_sends(
    sizes: dict[str, int], cases: list[tuple[str, str]]
) -> None:
    real = run_ranks(on_ranks, _ranks(sizes), sizes, cases)[0]
    traced = run_ranks(alone, 1, sizes, cases)[0]
    for case, (peak, sent), found in zip(cases, real, traced, strict=True):
        # What ranks bring to a step they tell one another on the CPU, which is not in a trace.
        brought = [key for key in sent if key[1] == "allgather"]
        assert [sent.pop(key) for key in brought] == [(1, 48)] * (_ranks(sizes) > 1), case
        # What docs/plan.md promises.
        assert found.peak_bytes == pytest.approx(peak, rel=0.1), case
        assert found.parameters_bytes + found.optimizer_bytes < found.peak_bytes
        if sizes == {"dp": 2} and case[1] == "float32":
            # DDP sends from within.
            assert found.sent["dp", "all-reduce"] == (1, found.gradients_bytes)
        else:
            assert found.sent == sent, case


def thousand() -> Any:
    from threefold.config.loading import validate
    from threefold.mesh.topology import resolve
    from threefold.model import load
    from threefold.run.plan_trace import trace

    config = validate(
        {
            "model": {"config": {**MODEL, "num_key_value_heads": 8}, "dtype": "bfloat16"},
            "mesh": {"dp": 128, "dp_shard": 128, "tp": 8},
            "train": {"global_batch": 128},
        }
    )
    topology, _ = resolve(config.mesh, launched_world_size=1024, num_devices=None)
    return trace(config, load.read_config(config.model), topology)


def test_any_number_of_ranks() -> None:
    found = run_ranks(thousand, 1)[0]
    assert {axis for axis, _ in found.sent} >= {"fsdp", "tp"}
    assert found.optimizer_bytes > found.parameters_bytes * 1.9


def _plan(folder: Path, *arguments: str) -> Any:
    (folder / "config.json").write_text(json.dumps({**MODEL, "tie_word_embeddings": False}))
    return command(folder, "plan", "config.json", *arguments)


def test_command(tmp_path: Path) -> None:
    keys = (
        "--mesh.dp_shard",
        "4",
        "--mesh.tp",
        "2",
        "--train.global_batch",
        "16",
        "--data.seq_len",
        "64",
    )
    printed = _plan(tmp_path, *keys, "--gpu", "h100-80gb")
    assert printed.returncode == 0, printed.stderr
    assert "parameters on dp=4 (sharded) x cp=1 x tp=2, 8 ranks" in printed.stdout
    assert (
        "it fits on h100-80gb: of 80 GiB" in printed.stdout
        and "fsdp         reduce-scatter" in printed.stdout
    )
    assert "a token costs" in printed.stdout
    told = json.loads(_plan(tmp_path, *keys, "--json").stdout)
    assert (
        told["ranks"] == 8
        and told["peak_bytes"] > told["parameters_bytes"] + told["optimizer_bytes"]
    )
    assert {each["axis"] for each in told["sent"]} >= {"fsdp", "tp"}
    large = _plan(
        tmp_path, "--train.global_batch", "4096", "--data.seq_len", "2048", "--gpu", "l4"
    )
    assert large.returncode == 1 and "it does not fit on l4:" in large.stdout, large.stderr


def test_sgd_waits_for_a_norm_that_a_trace_lacks(tmp_path: Path) -> None:
    keys = ("--mesh.dp_shard", "2", "--json", "--optimizer.name")
    adam, sgd = (
        json.loads(_plan(tmp_path, *keys, *name).stdout)
        for name in (("adamw",), ("sgd", "--optimizer.options", "{momentum: 0.9}"))
    )
    assert sgd["optimizer_bytes"] == pytest.approx(adam["optimizer_bytes"] / 2, rel=0.01)
    assert sgd["sent"] == adam["sent"]


def test_adapters_are_counted_as_a_ranking_counts_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    keys = ("--model.lora.r", "4", "--model.lora.target_modules", "all-linear")
    traced = _plan(tmp_path, *keys).stdout
    ranked = _plan(tmp_path, *keys, "--gpus", "1", "--gpu", "h100-80gb").stdout
    assert "frozen ones" in traced
    for line in traced.splitlines():
        if "GFLOP" in line:
            assert line in ranked
    assert traced.partition(" on ")[0] == ranked.partition(" on ")[0]  # the parameters


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("--mesh.tp", "16"), "mesh.tp = 16 cannot divide"),
        (("--mesh.dp", "auto"), "an axis of the mesh is auto"),
        (("--mesh.dp_shard", "auto"), "an axis of the mesh is auto"),
        (("--mesh.cpu_offload", "true"), "mesh.cpu_offload = true cannot be traced"),
        (("--train.activation_checkpointing", "offload"), "offload cannot be traced"),
        (("--gpu", "h1"), "--gpu h1 is not known"),
        (("--train.compile", "true"), "train.compile = true cannot be traced"),
        (
            ("--train.float8", "rowwise", "--model.dtype", "bfloat16"),
            "train.float8 = rowwise cannot be traced",
        ),
        (("--eval.every", "3"), "--eval.every has no effect on a step"),
        (("--optimizer.name", "muon"), "optimizer.name = muon cannot be traced"),
        (("--mesh.tp", "2", "--mesh.ep", "2"), "mesh.ep = 2 cannot be traced"),
        (("--train.micro_batch", "3"), "train.micro_batch = 3"),
    ],
)
def test_wrong_requests(keys: tuple[str, ...], said: str, tmp_path: Path) -> None:
    found = _plan(tmp_path, *keys)
    assert found.returncode == 2 and said in found.stderr, found.stderr
