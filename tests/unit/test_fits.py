"""A run against the memory that is free: what is refused, what would fit, and the micro-batch that is chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology, resolve
from threefold.model import load
from threefold.plan.accelerators import ACCELERATORS
from threefold.plan.advise import THERE, Question
from threefold.plan.decoder import decoder_of
from threefold.plan.efficiency import margin_of
from threefold.plan.fabric import fabric_of
from threefold.plan.fit import largest_micro_batch
from threefold.plan.memory import host_bytes, peak
from threefold.plan.setup import Setup, setup_of
from threefold.run.memory_check import _what_fits, fitted_into, refuse_too_much_of_host
from threefold.run.request import Asked

_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
_H100 = ACCELERATORS["h100-80gb"]
_FREE = 78 * 2**30


def _fitted(
    free: int, *, device: Any = _H100, **sections: dict[str, Any]
) -> tuple[Asked, Setup, Any]:
    values: dict[str, Any] = {
        "model": {"config": _8B, "dtype": "bfloat16"},
        "data": {"seq_len": 4096},
        "mesh": {"dp": 8, "dp_shard": 8, **sections.get("mesh", {})},
        "train": {"global_batch": 64, "compile": False, **sections.get("train", {})},
    }
    config = validate(values)
    topology, _ = resolve(config.mesh, launched_world_size=8, num_devices=None)
    architecture = load.read_config(config.model)
    decoder = decoder_of(architecture.to_dict())
    asked: Any = Asked(config, None, architecture)  # type: ignore[arg-type]
    setup = setup_of(config, decoder, topology, device)
    return fitted_into(asked, decoder, setup, free), setup, decoder


def test_the_largest_micro_batch_that_fits() -> None:
    found, setup, decoder = _fitted(_FREE)
    chosen = found.config.train.micro_batch
    assert (
        chosen in (1, 2, 4)
        and found.said[0][0] == f"micro-batch: {chosen} rows, {8 // chosen} of them a step"
    )

    def held(rows: int) -> float:
        fields = {**vars(setup), "micro_batch": rows, "num_batches": 8 // rows}
        return peak(decoder, Setup(**fields)).total

    assert held(chosen) <= _FREE < held(2 * chosen)
    assert found.estimated_bytes == round(held(chosen))


def test_all_rows_at_once_where_they_fit() -> None:
    """The config stays as it was asked for."""
    found, _, _ = _fitted(int(1e13))
    assert found.config.train.micro_batch == "auto"
    found, _, _ = _fitted(int(1e13), device=None, train={"compile": False})
    assert found.config.train.micro_batch == "auto" and not found.said


@pytest.mark.parametrize(
    ("free", "sections", "said"),
    [
        (_FREE, {"train": {"micro_batch": 8}}, "--train.micro_batch"),
        ((30 * 2**30), {"train": {"micro_batch": 1}}, "--mesh.tp 2"),
        (_FREE, {"train": {"micro_batch": 1}, "mesh": {"dp_shard": 1}}, "--mesh.dp_shard 8"),
    ],
)
def test_what_is_refused_and_would_fit(free: int, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        _fitted(free, **sections)
    (problem,) = error.value.problems
    assert (
        "are free" in problem.what
        and said in problem.fix
        and "--train.memory_check false" in problem.fix
    )
    # What is told does fit.
    keys = dict(re.findall(r"--(\S+) (\S+)", problem.fix.split("(or")[0]))
    given: dict[str, dict[str, Any]] = {name: dict(values) for name, values in sections.items()}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = (
            int(value) if value.isdigit() else value == "true" or value
        )
    assert _fitted(free, **given)[0].estimated_bytes <= free  # type: ignore[operator]


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError) as error:
        _fitted(2**30)
    assert "threefold plan shows what fits" in str(error.value)


def test_the_check_can_be_left_out() -> None:
    found, _, _ = _fitted(2**30, train={"micro_batch": 8, "memory_check": False})
    assert found.config.train.micro_batch == 8 and (found.estimated_bytes or 0) > 2**30


def test_a_run_that_nearly_fits_is_not_refused() -> None:
    """The estimate may be too high by a tenth."""
    found, _, _ = _fitted(int(1e13), train={"micro_batch": 2})
    assert found.estimated_bytes is not None
    _fitted(int(found.estimated_bytes / 1.05), train={"micro_batch": 2})
    with pytest.raises(ConfigError):
        _fitted(int(found.estimated_bytes / 1.25), train={"micro_batch": 2})


@pytest.mark.parametrize(
    ("sections", "key", "fix"),
    [
        (
            {"mesh": {"cpu_offload": True}},
            "mesh.cpu_offload = true",
            "--mesh.cpu_offload false",
        ),
        (
            {"train": {"activation_checkpointing": "offload"}},
            "train.activation_checkpointing = offload",
            "--train.activation_checkpointing full",
        ),
    ],
)
def test_what_the_host_cannot_hold_is_refused(
    sections: dict[str, Any], key: str, fix: str
) -> None:
    _, setup, decoder = _fitted(int(1e13), **sections)
    needed = host_bytes(decoder, setup)
    refuse_too_much_of_host(decoder, setup, int(needed * 0.91))
    refuse_too_much_of_host(decoder, setup, None)
    with pytest.raises(ConfigError) as error:
        refuse_too_much_of_host(decoder, setup, int(needed * 0.89))
    gib = f"{needed / 2**30:,.2f} GiB"
    assert str(error.value) == (
        f"a rank would keep about {gib} in its host's memory, of which {int(needed * 0.89) / 2**30:,.2f} GiB are free: "
        f"{key}\n"
        "  expected: host memory for what devices do not hold, as estimated before anything is loaded (docs/plan.md)\n"
        f"  fix: {fix}   (on more or larger devices; or, to start it all the same: --train.memory_check false)"
    )
    _, setup, decoder = _fitted(int(1e13))
    refuse_too_much_of_host(decoder, setup, 0)


def test_topology_is_the_one_that_is_told() -> None:
    assert _fitted(int(1e13))[1].topology == Topology(1, 8)


def test_doctor_says_what_a_rank_would_hold() -> None:
    from threefold.commands.doctor import _memory

    config = validate({"model": {"config": _8B, "dtype": "bfloat16"}, "mesh": {"dp": 2}})
    gpus = [{"name": "NVIDIA L4", "memory": 24 * 2**30, "free": 23 * 2**30}]
    (found,) = _memory(config, Topology(2), gpus, 2)
    assert (
        found.level == "warning"
        and "GiB in the" in found.what
        and "23.00 GiB" in found.expected
    )
    (found,) = _memory(config, Topology(2), [{**gpus[0], "memory": 10**12, "free": 10**12}], 2)
    assert found.level == "ok"
    assert _memory(validate({}), Topology(2), gpus, 2) == []
    assert (
        _memory(validate({"model": {"config": {"model_type": "mamba"}}}), Topology(), [], 1)
        == []
    )


_TALL = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
_QWEN = {**_8B, "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "0.1B": {
        **_8B,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "0.5B": {
        **_8B,
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
    }
    | {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1B": {
        **_8B,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "1.5B": {
        **_8B,
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
    }
    | {
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "3B": {
        **_8B,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "4B": {
        **_QWEN,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "tie_word_embeddings": True,
    },
    "8B": _8B,
    "14B": {**_QWEN, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
    | {"num_attention_heads": 40},
    "32B": {
        **_8B,
        **_TALL,
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
    }
    | {"num_hidden_layers": 64, "vocab_size": 151936},
    "70B": {
        **_8B,
        **_TALL,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
    },
    "8x7B": {
        **_8B,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "30B-A3B": {
        **_8B,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "head_dim": 128,
    }
    | {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


@pytest.mark.parametrize("gpus", [1, 8, 64])
@pytest.mark.parametrize("name", MODELS)
def test_the_default_or_what_is_told_in_its_place_is_as_fast_as_the_best_mesh(
    name: str, gpus: int
) -> None:
    """By the estimate, within 5 %; of 64, a launcher's, nothing is sharded by default."""
    assert _slower_than_the_best(name, gpus, rows=8, seq_len=4096) <= 1.05


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_a_whole_model_repeat_its_update_which_shows_where_steps_are_short(
    name: str,
) -> None:
    """One model of 64 devices, by a difference that the estimate does not tell."""
    slower = _slower_than_the_best(name, 64, rows=2, seq_len=8192)
    assert slower <= 1.05 or (
        name == "1B" and slower - 1 < margin_of(_H100, mixture=False).difference
    )


def _slower_than_the_best(name: str, gpus: int, *, rows: int, seq_len: int) -> float:
    """How many times as long a step takes on the default mesh, or on what is told in its place, as on the best one.

    Args:
        rows: of each device in a step.
    """
    fabric, free = (
        fabric_of(_H100, in_host=min(8, gpus), link=None, network=None),
        int(THERE * _H100.memory_bytes),
    )
    launched, devices = (gpus, None) if gpus > 8 else (None, gpus)
    values: dict[str, dict[str, Any]] = {
        "model": {"config": MODELS[name], "dtype": "bfloat16"},
        "data": {"seq_len": seq_len},
        "train": {"global_batch": rows * gpus},
    }
    decoder = decoder_of(MODELS[name])
    for _ in range(2):
        config = validate(values)
        topology, _why = resolve(config.mesh, launched_world_size=launched, num_devices=devices)
        setup = setup_of(config, decoder, topology, _H100)
        if config.train.micro_batch == "auto":
            setup = largest_micro_batch(decoder, setup, free)
        if peak(decoder, setup).total <= free:
            break
        told = _what_fits(config, decoder, setup, free)
        for key, value in re.findall(r"--(\S+) (\S+)", told):
            section, _, last = key.partition(".")
            values.setdefault(section, {})[last] = (
                int(value) if value.isdigit() else value == "true" or value
            )
    question = Question(decoder, config, frozenset(), gpus, fabric, _H100)
    assert question.plan(setup).fits
    best = Question(
        decoder, validate({**values, "mesh": {}}), frozenset(), gpus, fabric, _H100
    ).plans()[0]
    return question.plan(setup).duration.total / best.duration.total
