"""The estimate against a trace of the real code, whose bytes are those of ranks (`test_traced`), and against ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ranks.held import held_and_sent
from ranks.runs import cold_command, command, prepare
from ranks.spawn import run_ranks
from threefold.records.metrics import Metrics

pytestmark = pytest.mark.ranks

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8,
    },
    "Llama-3.2-1B": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "a mixture of 2B": {
        "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072,
        "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip
# Shape, mesh, checkpointing, tokens of a row, rows of a micro-batch, micro-batches.
CASES: list[tuple[str, dict[str, Any], str, int, int, int]] = [
    ("Llama-3.1-8B", {"dp": 8, "dp_shard": 8}, "selective", 8192, 2, 1),
    ("Llama-3.1-8B", {"dp": 64, "dp_shard": 8, "tp": 8}, "full", 4096, 2, 2),
    ("Llama-3.1-8B", {"dp": 16, "dp_shard": 16, "cp": 8, "tp": 8}, "none", 8192, 1, 1),
    ("Llama-3.1-8B", {"dp": 128, "dp_shard": 128, "tp": 8}, "selective", 8192, 1, 1),
    ("Llama-3.2-1B", {}, "none", 2048, 4, 1),
    ("Llama-3.2-1B", {"dp": 8}, "full", 2048, 4, 2),
    (
        "Llama-3.2-1B",
        {"dp": 4, "dp_shard": 2, "tp": 4, "sequence_parallel": True},
        "selective",
        512,
        2,
        2,
    ),
    ("Llama-3.2-1B", {"dp": 2, "dp_shard": 2, "cp": 8}, "selective", 4096, 2, 1),
    ("Qwen3-0.6B", {"dp": 1024, "dp_shard": 64}, "none", 4096, 2, 2),
    ("Qwen3-0.6B", {"dp": 16, "dp_shard": 16, "tp": 8}, "full", 2048, 8, 3),
    ("a mixture of 2B", {"dp": 32, "dp_shard": 32}, "full", 2048, 4, 2),
    ("a mixture of 2B", {"dp": 16, "dp_shard": 4, "tp": 4}, "none", 2048, 2, 1),
]
_SMALL = {
    **SHAPES["Llama-3.2-1B"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
QUICK: list[tuple[dict[str, Any], str, str]] = [
    ({}, "none", "float32"),
    ({"dp": 2}, "selective", "float32"),
    ({"dp": 64, "dp_shard": 8, "tp": 4}, "full", "bfloat16"),
    ({"dp": 4, "dp_shard": 4, "cp": 4}, "none", "bfloat16"),
    ({"dp": 16, "dp_shard": 16, "sequence_parallel": True, "tp": 8}, "selective", "bfloat16"),
]


def _values(
    model: dict[str, Any],
    mesh: dict[str, Any],
    mode: str,
    *,
    dtype: str,
    seq_len: int,
    rows: int,
    batches: int,
) -> dict[str, Any]:
    return {
        "model": {"config": model, "dtype": dtype},
        "data": {"seq_len": seq_len},
        "mesh": mesh,
        "train": {
            "activation_checkpointing": mode, "micro_batch": rows, "global_batch": rows * batches * mesh.get("dp", 1)
        },
    }  # fmt: skip


def both(cases: list[dict[str, Any]]) -> list[tuple[Any, float, Any]]:
    """(what was traced, the estimated peak, the estimated traffic) of each config."""
    from ranks.traffic import traffic
    from threefold.config.loading import validate
    from threefold.mesh.topology import resolve
    from threefold.model import load
    from threefold.plan.adapters import adapted
    from threefold.plan.decoder import decoder_of
    from threefold.plan.memory import peak
    from threefold.plan.setup import checked
    from threefold.run.plan_trace import trace

    found = []
    for values in cases:
        config = validate(values)
        ranks = math.prod(values["mesh"].get(axis, 1) for axis in ("dp", "cp", "tp"))
        topology, _ = resolve(config.mesh, launched_world_size=ranks, num_devices=None)
        architecture = load.read_config(config.model)
        decoder = adapted(decoder_of(architecture.to_dict()), config.model.lora)
        setup = checked(config, decoder, topology, None)
        traced = trace(config, architecture, topology)
        found.append((traced, peak(decoder, setup).total, traffic(decoder, setup)))
    return found


def _agree(found: list[tuple[Any, float, Any]], names: list[str]) -> None:
    for (traced, estimated, sent), name in zip(found, names, strict=True):
        # What docs/plan.md promises.
        assert estimated == pytest.approx(traced.peak_bytes, rel=0.1), name
        assert set(sent) == set(traced.sent), name
        for key, (calls, size) in traced.sent.items():
            assert sent[key][0] == calls and sent[key][1] == pytest.approx(size, rel=0.05), (
                name,
                key,
            )


def test_estimate_is_what_is_traced() -> None:
    cases = [
        _values(_SMALL, mesh, mode, dtype=dtype, seq_len=256, rows=2, batches=batches)
        for batches, (mesh, mode, dtype) in enumerate(QUICK, start=1)
    ]
    # DDP's gradients are the largest part of it, and are there once.
    cases.append(
        _values(_SMALL, {"dp": 2}, "full", dtype="float32", seq_len=32, rows=1, batches=1)
    )
    _agree(run_ranks(both, 1, cases)[0], [str(each["mesh"]) for each in cases])


# Sections besides, mesh, checkpointing, type.
_DROPPED = {"r": 8, "dropout": 0.1, "target_modules": ["k_proj", "down_proj"]}
BESIDES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (besides, mesh, mode, dtype)
    for besides in (
        {"model": {"lora": {"r": 8}}},
        {"model": {"lora": {"r": 32, "target_modules": "all-linear"}}},
        {"model": {"lora": _DROPPED}},
        {"optimizer": {"ema": 0.99}},
        {"data": {"document_mask": True}},
    )
    for mesh in (
        {},
        {"dp": 8},
        {"dp": 8, "dp_shard": 4, "tp": 2},
        {"dp": 2, "dp_shard": 2, "cp": 2},
    )
    if "data" not in besides or "cp" not in mesh
    for mode, dtype in (
        ("none", "float32"),
        ("none", "bfloat16"),
        ("selective", "bfloat16"),
        ("full", "bfloat16"),
    )
]


def _with_besides(
    case: tuple[dict[str, Any], dict[str, Any], str, str], batches: int
) -> dict[str, Any]:
    besides, mesh, mode, dtype = case
    values = _values(_SMALL, mesh, mode, dtype=dtype, seq_len=256, rows=2, batches=batches)
    return values | {name: {**values.get(name, {}), **keys} for name, keys in besides.items()}


def test_estimate_of_adapters_and_averages() -> None:
    cases = BESIDES[::13]
    _agree(
        run_ranks(both, 1, [_with_besides(each, 2) for each in cases])[0], list(map(str, cases))
    )


@pytest.mark.long
def test_estimate_of_adapters_and_averages_on_every_mesh() -> None:
    cases = [(each, batches) for each in BESIDES for batches in (1, 3)]
    _agree(
        run_ranks(both, 1, [_with_besides(*each) for each in cases], timeout_s=500)[0],
        list(map(str, cases)),
    )


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimate_of_published_shapes(
    case: tuple[str, dict[str, Any], str, int, int, int],
) -> None:
    name, mesh, mode, seq_len, rows, batches = case
    values = _values(
        SHAPES[name], mesh, mode, dtype="bfloat16", seq_len=seq_len, rows=rows, batches=batches
    )
    _agree(run_ranks(both, 1, [values], timeout_s=300)[0], [name])


def rows_chosen() -> tuple[int | str, int | None, str]:
    """The micro-batch and the estimate of this rank, whose device has less memory than that of the rank before it."""
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.run import memory_check
    from threefold.run.request import Asked

    mesh = init_mesh(dp=2, device="cpu")
    memory_check.memory_here = lambda mesh: (6 * 10**9 - 4 * 10**9 * mesh.rank, 0)
    config = validate(
        _values(_SMALL, {"dp": 2}, "none", dtype="float32", seq_len=1024, rows=64, batches=1)
    )
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"micro_batch": "auto"})}
    )
    asked: Any = Asked(config, None, load.read_config(config.model))  # type: ignore[arg-type]
    found = memory_check.fitted(asked, mesh)
    return found.config.train.micro_batch, found.estimated_bytes, found.said[0][0]


def test_ranks_choose_the_same_rows() -> None:
    """Those that fit into the smallest memory."""
    first, second = run_ranks(rows_chosen, 2)
    assert first == second
    assert first[0] in (1, 2, 4, 8, 16, 32) and first[1] is not None and first[1] <= 2 * 10**9
    assert first[2] == f"micro-batch: {first[0]} rows, {64 // first[0]} of them a step"


@pytest.mark.long
def test_estimate_of_every_family() -> None:
    """Without checkpointing and with all of it: what each family's layers keep."""
    from threefold.plan.families import FAMILIES

    cases, names = [], []
    for name, family in FAMILIES.items():
        if family.written_out:
            continue
        sizes: dict[str, Any] = {
            "model_type": name, "num_hidden_layers": 3, "hidden_size": 1024, "num_attention_heads": 16,
            "num_key_value_heads": 4, "vocab_size": 8000, "intermediate_size": 3072, "attention_dropout": 0.0,
            "sliding_window": 256,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip
        if family.experts:
            sizes |= {family.expert_width: 512, "num_experts_per_tok": 2}
            sizes[
                "num_local_experts" if family.experts == "num_local_experts" else "num_experts"
            ] = 8
        if name == "phi":
            sizes["hidden_act"] = "gelu"
        if family.head_dim is not None or name in (
            "cohere",
            "helium",
            "hunyuan_v1_dense",
            "nemotron",
        ):
            sizes["head_dim"] = 64
        for mode in ("none", "full"):
            values = _values(
                sizes,
                {"dp": 8, "dp_shard": 8},
                mode,
                dtype="bfloat16",
                seq_len=1024,
                rows=4,
                batches=1,
            )
            cases.append(values)
            names.append(f"{name}, {mode}")
    _agree(run_ranks(both, 1, cases, timeout_s=500)[0], names)


_100M = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
ON_RANKS: list[dict[str, int]] = [
    {},
    {"dp": 2},
    {"dp": 2, "dp_shard": 2},
    {"dp": 4, "dp_shard": 2},
    {"tp": 2},
    {"dp": 2, "dp_shard": 2, "cp": 2},
    {"exact": 1},
    {"dp": 2, "dp_shard": 2, "exact": 1},
]
_MODES = ("none", "selective", "full")


def _of_100m(sizes: dict[str, int]) -> list[Any]:
    from threefold.config.loading import validate

    modes, fields = (
        _MODES[-1:] if "exact" in sizes else _MODES,
        {"dtype": "float32", "seq_len": 256, "rows": 1, "batches": 2},
    )
    found = [_values(_100M, _mesh_of(sizes), mode, **fields) for mode in modes]  # type: ignore[arg-type]
    for values in found if "exact" in sizes else ():
        values["train"]["reduce"] = "exact"
    return [validate(values) for values in found]


def _mesh_of(sizes: dict[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if axis != "exact"}


def real(sizes: dict[str, int]) -> list[int]:
    """The most bytes alive on a rank, for each kind of checkpointing."""
    return [
        held for held, _ in held_and_sent(_mesh_of(sizes), _of_100m(sizes), rows=1, batches=2)
    ]


def estimated(sizes: dict[str, int]) -> list[float]:
    from threefold.mesh.topology import resolve
    from threefold.plan.decoder import decoder_of
    from threefold.plan.memory import peak
    from threefold.plan.setup import setup_of

    found = []
    for config in _of_100m(sizes):
        ranks = math.prod(size for axis, size in _mesh_of(sizes).items() if axis != "dp_shard")
        topology, _ = resolve(config.mesh, launched_world_size=ranks, num_devices=None)
        decoder = decoder_of(_100M)
        found.append(peak(decoder, setup_of(config, decoder, topology, None)).total)
    return found


@pytest.mark.long
@pytest.mark.parametrize("sizes", ON_RANKS, ids=str)
def test_estimate_is_what_ranks_hold(sizes: dict[str, int]) -> None:
    """A model of 107 million parameters, in steps that are really made."""
    ranks = math.prod(size for axis, size in _mesh_of(sizes).items() if axis != "dp_shard")
    held = run_ranks(real, ranks, sizes, timeout_s=500)[0]
    assert estimated(sizes) == pytest.approx(held, rel=0.1)


_WHOLE_BYTES = 64 * 2**20


def copies() -> dict[str, float]:
    """What each collective holds besides the tensors that it is given, in wholes."""
    import resource

    import torch
    import torch.distributed as dist

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    found: dict[str, float] = {}
    whole, part = (torch.ones(_WHOLE_BYTES // 4 // share) for share in (1, 2))
    for name, call in {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
    }.items():
        dist.barrier()
        # What the collective before it held, so that this one's would be above it.
        held = [torch.ones(_WHOLE_BYTES // 4) for _ in range(round(sum(found.values())))]
        before = most()
        call()
        found[name] = (most() - before) / _WHOLE_BYTES
        del held
    return found


def test_gloo_copies_what_is_gathered_and_what_is_scattered() -> None:
    for found in run_ranks(copies, 2):
        assert found == pytest.approx(
            {"all-reduce": 0, "reduce-scatter": 1, "all-gather": 1}, abs=0.2
        )


# Mostly of an embedding and a head, so that a copy of what is reduced at the end is a seventh of the process.
_WIDE = {
    "model_type": "llama", "vocab_size": 100000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


def test_estimate_is_what_a_process_holds(tmp_path: Path) -> None:
    prepare(tmp_path)
    keys = (
        "--model.config",
        json.dumps(_WIDE),
        "--model.dtype",
        "float32",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
    )
    keys += (
        "--data.seq_len",
        "64",
        "--train.global_batch",
        "4",
        "--mesh.dp",
        "2",
        "--mesh.dp_shard",
        "2",
    )
    # Of an interpreter of its own: the server of the tests' ranks has loaded more than a run does.
    done = cold_command(
        tmp_path,
        "train",
        *keys,
        "--model.admission",
        "off",
        "--train.steps",
        "3",
        "--log.dir",
        "run",
    )
    assert done.returncode == 0, done.stderr
    planned = json.loads(command(tmp_path, "plan", "config.yaml", *keys, "--json").stdout)
    held = Metrics(tmp_path / "run" / "metrics.jsonl").last["peak_memory_bytes"]
    assert planned["resident_bytes"] == pytest.approx(held, rel=0.1)
