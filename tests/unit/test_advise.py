"""`threefold plan --gpus`: what is ranked, what is told, what it writes, and published runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from threefold.commands import main
from threefold.config.loading import load, validate
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology, resolve
from threefold.plan.accelerators import ACCELERATORS, Accelerator
from threefold.plan.adapters import adapted
from threefold.plan.advise import THERE, Question, pareto, what_fits
from threefold.plan.decoder import decoder_of
from threefold.plan.duration import duration
from threefold.plan.fabric import Fabric, fabric_of
from threefold.plan.memory import OWN_SHARE, peak, timeline
from threefold.plan.setup import Setup, setup_of

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}  # fmt: skip
_8B = {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_70B = {
    **_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_H100 = ACCELERATORS["h100-80gb"]


@pytest.fixture(autouse=True)
def _commands() -> None:
    main._load(main._COMMANDS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_8B))
    return path


def _run(path: Path, *arguments: str, gpus: int = 64) -> Any:
    asked = [
        "plan",
        str(path),
        "--gpus",
        str(gpus),
        "--gpu",
        "h100-80gb",
        "--nodes",
        str(gpus // 8),
    ]
    return CliRunner().invoke(
        main.app, [*asked, "--data.seq_len", "8192", "--train.global_batch", "512", *arguments]
    )


_GIB = 2**30


def _lines(setup: Setup, moment: str) -> dict[str, float]:
    found = next(each for each in timeline(decoder_of(_8B), setup) if each.name == moment)
    return {line: size for line, size in found.lines.items() if line != "the device's own"}


def test_published_memory_of_torchtitan() -> None:
    """Its eager run is reported with 82.4 GiB, its compiled one with 77.0, both as the allocator's reserve.

    Without fitting, line by line: it keeps every second product, and all logits: in bfloat16, and at the peak of the
    loss three times in float32 (the log of the softmax, the gradient by that, and by the logits). The allocator's share
    is the one of every estimate. A compiled layer does not keep its last product, which no gradient needs; where
    operators run one by one, selective recomputation keeps it all the same.
    """
    tokens, vocabulary, layers = 2 * 8192, 128256, 32
    lines = _lines(Setup(Topology(1, 8), 8192, 2, recompute="selective", device=_H100), "loss")
    # Key, attention's output, up.
    lines["activations"] -= layers * tokens * 2 * (1024 + 4096 + 14336)
    del lines["a chunk of logits"], lines["the head's gradient"]
    eager = sum(lines.values()) + tokens * vocabulary * (2 + 3 * 4)
    compiled = eager - layers * tokens * 2 * 4096
    assert eager / _GIB == pytest.approx(72.4, abs=0.1) and compiled / _GIB == pytest.approx(
        68.4, abs=0.1
    )
    assert (1 + OWN_SHARE) * eager / _GIB == pytest.approx(82.4, rel=0.1)
    assert (1 + OWN_SHARE) * compiled / _GIB == pytest.approx(77.0, rel=0.1)


def test_published_memory_of_a_long_row() -> None:
    """ArcticTraining's 65k tokens on one H200, weights and Adam on the host, full checkpointing: 137.4 GB.

    Of ours at the loss: the inputs of the layers and the head; all logits as above instead of a chunk. It holds whether
    its unit is 10^9 bytes or 2^30.
    """
    tokens, vocabulary = 65536, 128256
    setup = Setup(
        Topology(), tokens, 1, recompute="full", cpu_offload=True, device=ACCELERATORS["h200"]
    )
    lines = _lines(setup, "loss")
    lines["gathered weights"] /= 2  # of the embedding and the head, it gathers one at a time
    del lines["a chunk of logits"]
    total = sum(lines.values()) + tokens * vocabulary * (2 + 3 * 4)
    assert total / 1e9 == pytest.approx(137.4, rel=0.1) and total / _GIB == pytest.approx(
        137.4, rel=0.1
    )


def _question(
    values: dict[str, Any], gpus: int, keys: dict[str, Any], device: Accelerator = _H100
) -> Question:
    config = validate(
        {"model": {"config": values, "dtype": "bfloat16"}, "data": {"seq_len": 8192}, **keys}
    )
    pinned = frozenset(f"{section}.{key}" for section, own in keys.items() for key in own)
    fabric = fabric_of(device, in_host=min(8, gpus), link=None, network=None)
    return Question(decoder_of(values), config, pinned, gpus, fabric, device)


def test_plans_are_legal_complete_and_ranked() -> None:
    question = _question(_8B, 16, {"train": {"global_batch": 32}})
    plans = question.plans()
    assert {plan.setup.topology.world_size for plan in plans} == {16}
    assert all(
        plan.setup.micro_batch * plan.setup.num_batches * plan.setup.topology.dp == 32
        for plan in plans
    )
    assert all(plan.setup.topology.tp <= 8 for plan in plans)
    meshes = {
        (each.dp, each.dp_shard, each.cp, each.tp)
        for each in (plan.setup.topology for plan in plans)
    }
    assert {(16, 16, 1, 1), (16, 4, 1, 1), (2, 1, 1, 8), (4, 4, 2, 2), (1, 1, 16, 1)} <= meshes
    fits = [plan.fits for plan in plans]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    fastest = min(plan.duration.total for plan in plans if plan.fits)
    assert plans[0].duration.total < 1.01 * fastest
    front = pareto(plans)
    for one in front:
        assert not any(
            other.fits
            and other.duration.total < one.duration.total
            and other.memory_bytes < one.memory_bytes
            for other in plans
        )


def test_each_plan_is_what_its_keys_ask_for() -> None:
    """A plan's keys, given to `train`, are that set-up."""
    question = _question(_8B, 8, {"train": {"global_batch": 16}})
    for plan in question.plans()[::17]:
        sections = plan.sections()
        keys = {"mesh": sections["mesh"], "train": {**sections["train"], "global_batch": 16}}
        config = validate(
            {"model": {"config": _8B, "dtype": "bfloat16"}, "data": {"seq_len": 8192}, **keys}
        )
        topology, _ = resolve(config.mesh, launched_world_size=8, num_devices=None)
        assert setup_of(config, question.decoder, topology, _H100) == plan.setup


def test_what_does_not_fit_says_what_would() -> None:
    question = _question(_8B, 8, {"train": {"global_batch": 16}})
    plans = question.plans()
    rejected = [plan for plan in plans if not plan.fits]
    for plan in rejected[::60]:
        assert plan.why.startswith("needs ") and " GiB of 77.6: " in plan.why
        fix = what_fits(plan, plans)
        assert fix is not None
        changes = dict(zip(*[iter(fix.split())] * 2, strict=True))
        told = {"train": {"global_batch": "16"}, **plan.sections()}
        for key, value in changes.items():
            section, name = key.removeprefix("--").split(".")
            told[section][name] = (
                json.loads(value) if value in ("true", "false") or value.isdigit() else value
            )
        keys = {**told, "train": {**told["train"], "global_batch": 16}}
        found = _question(
            _8B, 8, {"train": {**keys["train"]}, "mesh": {**keys["mesh"]}}
        ).plans()
        assert [each.fits for each in found] == [True], fix


def test_nothing_fits() -> None:
    keys = {"train": {"global_batch": 1}, "mesh": {"cpu_offload": False}}
    plans = _question(_70B, 1, keys, ACCELERATORS["l4"]).plans()
    assert not plans[0].fits and what_fits(plans[0], plans) is None and pareto(plans) == []


def test_pinned_keys_are_kept() -> None:
    keys = {
        "mesh": {"tp": 2, "cp": 1},
        "train": {"global_batch": 16, "activation_checkpointing": "full"},
    }
    plans = _question(_8B, 8, keys).plans()
    assert {
        (each.setup.topology.tp, each.setup.topology.cp, each.setup.recompute) for each in plans
    } == {(2, 1, "full")}


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"recompute": "full"}, {"recompute": "selective"}),
        ({"recompute": "offload"}, {"recompute": "full"}),
        ({"micro_batch": 1}, {"micro_batch": 2}),
        ({"cpu_offload": True}, {"cpu_offload": False}),
        ({"moments": 4.0}, {"moments": 8.0}),
        ({"topology": Topology(1, 16)}, {"topology": Topology(2, 8)}),
        ({"topology": Topology(1, 8, 1, 2)}, {"topology": Topology(1, 8)}),
    ],
    ids=str,
)
def test_what_saves_memory(less: dict[str, Any], more: dict[str, Any]) -> None:
    decoder = decoder_of(_8B)
    setup = Setup(Topology(1, 8), 8192, 2, recompute="selective", device=_H100)
    assert (
        peak(decoder, replace(setup, **less)).total
        < peak(decoder, replace(setup, **more)).total
    )


def test_collectives_take_longer_over_the_network() -> None:
    fabric = Fabric(8, 450e9, 50e9)
    inside = fabric.seconds("all-reduce", 1e9, ranks=8, stride=1)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 450e9), rel=0.05)
    # Of a host each rank has a neighbour elsewhere, or all eight have one together.
    assert fabric.seconds("all-reduce", 1e9, ranks=8, stride=8) == pytest.approx(
        9 * inside, rel=0.1
    )
    assert fabric.seconds("all-gather", 1e9, ranks=16, stride=1) < 2 * fabric.seconds(
        "all-gather", 1e9, ranks=8, stride=1
    )
    assert fabric.seconds("all-reduce", 1e9, ranks=1, stride=1) == 0


def test_command(config: Path, tmp_path: Path) -> None:
    done = _run(
        config, "--tokens", "20B", "--price", "2.5", "--emit", str(tmp_path / "out.yaml")
    )
    assert done.exit_code == 0, done.output
    assert "llama: 8,030,261,248 parameters on 64 x h100-80gb, 8 in a host" in done.output
    assert "days" in done.output and "cost" in done.output and "fits with --" in done.output
    assert "tp: no difference with it that the estimate resolves: it resolves 8%" in done.output
    emitted = load(str(tmp_path / "out.yaml"), environ={}).config
    first = json.loads(_run(config, "--json").output)[0]
    assert first["fits"] and first["memory_bytes"] < THERE * _H100.memory_bytes
    mesh = {axis: getattr(emitted.mesh, axis) for axis in ("dp", "dp_shard", "cp", "tp")}
    assert first["mesh"] == mesh and first["micro_batch"] == emitted.train.micro_batch
    assert (
        emitted.train.global_batch == 512
        and emitted.model.dtype == "bfloat16"
        and emitted.data.seq_len == 8192
    )
    for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu"):
        low, high = first[f"{name}_low"], first[f"{name}_high"]
        assert low == pytest.approx(first[name] / 1.11) and high == pytest.approx(
            first[name] * 1.11
        )
    wanted = {
        *(
            "mesh",
            "micro_batch",
            "activation_checkpointing",
            "compile",
            "memory_bytes",
            "step_time_s",
        ),
        *("tokens_per_s_per_gpu", "mfu", "fits", "why"),
    }
    assert wanted <= first.keys()


def test_every_figure_of_time_is_a_range(config: Path) -> None:
    done = _run(config, "--tokens", "20B", "--price", "2.5")
    assert (
        "low-high: what 8 in 10 published speeds of dense models keep to: a factor of 1.11 on either side"
        in done.output
    )
    row = next(line for line in done.output.splitlines() if line.startswith("*=  dp="))
    ranges = re.findall(r"([\d.,]+)%?-([\d.,]+)%?", row)
    assert len(ranges) == 5  # s a step, tokens/s, MFU, days, cost
    for low, high in ranges:
        least, most = (float(each.replace(",", "")) for each in (low, high))
        assert most / least == pytest.approx(1.11**2, rel=0.04)  # as far as their digits tell


def test_only_a_difference_that_can_be_told_is_said_to_be_one(config: Path) -> None:
    """Over slow links tp is far slower: that is said, as is by how much."""
    done = _run(config, "--link", "pcie4", "--train.activation_checkpointing", "full", gpus=8)
    said = re.search(r"tp: would not pay, ([\d.]+)% slower", done.output)
    assert said is not None and float(said[1]) > 8
    question = _question(_8B, 8, {"train": {"global_batch": 16}})
    first, *others = question.plans()
    told = [plan for plan in others if plan.fits and plan.slower_than(first)]
    assert told and all(plan.duration.total >= 1.08 * first.duration.total for plan in told)
    assert first.slower_than(first) == 0.0
    unsure = _question(_8B, 8, {"train": {"global_batch": 16}}, ACCELERATORS["l40s"]).plans()[0]
    assert (
        unsure.margin.difference == 2 * first.margin.difference and unsure.margin.figure > 1.5
    )


def test_given_keys_are_in_the_config_that_is_written(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    keys = (
        "--model.lora.r",
        "16",
        "--model.lora.target_modules",
        "all-linear",
        "--optimizer.betas",
        "[0.9, 0.99]",
    )
    done = _run(config, *keys, "--emit", str(path), gpus=8)
    assert done.exit_code == 0, done.output
    emitted = load(str(path), environ={}).config
    assert emitted.model.lora.r == 16 and emitted.model.lora.target_modules == "all-linear"
    assert emitted.optimizer.betas == (0.9, 0.99) and emitted.model.config == _8B


@pytest.mark.parametrize("gpus", [64, pytest.param(16384, marks=pytest.mark.long)])
def test_a_plan_loads_no_torch(config: Path, gpus: int) -> None:
    code = (
        "import sys; from threefold.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    asked = ["--gpus", str(gpus), "--gpu", "h100-80gb", "--data.seq_len", "8192"]
    asked += ["--train.global_batch", str(max(512, gpus))]
    command = [sys.executable, "-c", code, "plan", str(config), *asked, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h1"), "--gpu h1 is not known"),
        (("--nodes", "7"), "--gpus 16 cannot be divided over --nodes 7"),
        (("--tokens", "many"), "--tokens many is not a number of tokens"),
        (("--tokens", "-1B"), "--tokens -1B is not a number of tokens"),
        (("--price", "2"), "--price has no effect without --tokens"),
        (("--ranks", "8"), "unknown key ranks"),
        (
            ("--html", "page.html"),
            "fix: leave it out: --json prints every set-up of `threefold plan`",
        ),
        (
            ("--calibrate", "runs/a"),
            "fix: leave it out: the seconds of `threefold plan` are estimates",
        ),
        (("--trace",), "fix: threefold plan MODEL without --gpus traces a set-up"),
        (("--seq-len", "8192"), "fix: --data.seq_len N"),
        (("--global-batch", "512"), "fix: --train.global_batch N"),
        (("--network", "pigeon"), "--network pigeon is not known"),
        (("--link", "nvlink9"), "--link nvlink9 is not known"),
        (("--mesh.tp", "3"), "no mesh of 16 devices is legal"),
        (("--mesh.tp", "16"), "mesh.tp = 16 cannot divide the 8 key-value heads"),
        (("--train.global_batch", "7", "--mesh.cp", "1"), "no mesh of 16 devices is legal"),
        (
            ("--model.lora.r", "8", "--model.lora.target_modules", "[rotary]"),
            "model.lora.target_modules has rotary",
        ),
        (("--network", "0GB/s"), "--network 0GB/s is not known"),
        (("--train.objective", "dpo"), "train.objective = dpo cannot be estimated"),
        (("--optimizer.name", "muon"), "optimizer.name = muon cannot be estimated"),
        (
            ("--data.document_mask", "true", "--mesh.cp", "2"),
            "data.document_mask = true cannot be estimated",
        ),
        (("--data.seq_len", "262144"), "the model supports at most 131072 positions"),
        (("--log.every", "3"), "--log.every has no effect on a step"),
        (("--mehs.tp", "2"), "mehs"),
        (("--emit", "/nowhere/out.yaml"), "/nowhere/out.yaml"),
    ],
)
def test_wrong_requests(arguments: tuple[str, ...], said: str, config: Path) -> None:
    error = _run(config, *arguments, gpus=16).exception
    assert error is not None and said in str(error)


def test_what_is_there_is_not_overwritten(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# my notes")
    error = _run(config, "--emit", str(tmp_path / "mine.yaml"), gpus=16).exception
    assert (
        isinstance(error, ConfigError)
        and error.problems[0].what == f"{tmp_path}/mine.yaml: File exists"
    )
    assert (tmp_path / "mine.yaml").read_text() == "# my notes"


def test_links_as_doctor_measures_them() -> None:
    """A bandwidth that collectives reached: they are estimated to reach it, as they do a part of a data sheet's."""
    preset, measured = (
        fabric_of(_H100, in_host=8, link=link, network=None) for link in ("nvlink4", "360GB/s")
    )
    assert measured == preset
    between = fabric_of(_H100, in_host=8, link=None, network="10 GiB/s").seconds(
        "all-gather", 2e9, ranks=2, stride=8
    )
    assert between == pytest.approx(0.5 * 2e9 / (10 * 2**30), rel=0.01)


def test_adapters_cost_little_memory_and_no_gradients_of_weights() -> None:
    """Of an 8B on 8 devices: the moments and gradients of 0.4 % of it, and a third of the products less."""
    of = {
        rank: adapted(decoder_of(_8B), validate({"model": {"lora": {"r": rank}}}).model.lora)
        for rank in (0, 16)
    }
    setup = Setup(Topology(1, 8), 4096, 1, device=_H100)
    whole, narrow = (peak(each, setup) for each in of.values())
    assert (
        narrow.lines["moments"] < 0.01 * whole.lines["moments"]
        and narrow.total < 0.75 * whole.total
    )
    fabric = fabric_of(_H100, in_host=8, link=None, network=None)
    assert duration(of[16], setup, fabric).products == pytest.approx(
        2 / 3 * duration(of[0], setup, fabric).products, rel=0.02
    )
    assert adapted(of[0], validate({}).model.lora) is of[0]


def test_what_a_plan_reads_of_a_store(config: Path) -> None:
    printed = _run(
        config, "--data.source", "s3://bucket/tokens", "--mesh.dp", "8", gpus=8
    ).output
    found = re.search(
        r"reads 512 MiB a step of the store, .*; a dp rank waits where its part is below ([\d.,]+) MiB/s",
        printed,
    )
    seconds = json.loads(_run(config, "--mesh.dp", "8", "--json", gpus=8).output)[0][
        "step_time_s"
    ]
    assert found is not None and float(found[1].replace(",", "")) == pytest.approx(
        64 / seconds, abs=0.05
    )
    assert "of the store" not in _run(config, gpus=8).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "1B"), "--tokens has no effect without --gpus"),
        (("--gpus", "8"), "--gpus without --gpu"),
    ],
)
def test_options_that_need_others(arguments: tuple[str, ...], said: str, config: Path) -> None:
    error = CliRunner().invoke(main.app, ["plan", str(config), *arguments]).exception
    assert error is not None and said in str(error)


def test_the_yaml_of_a_run_is_planned_with_the_model_that_it_trains(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("train: {global_batch: 64}\n")
    ranked = CliRunner().invoke(
        main.app, ["plan", str(job), "--gpus", "8", "--gpu", "h100-80gb", "--json"]
    )
    assert ranked.exit_code == 0, ranked.output
    assert json.loads(ranked.stdout)
    sizes = (
        "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
    )
    job.write_text(f"model: {{config: {{model_type: llama, {sizes}}}}}")
    ranked = CliRunner().invoke(main.app, ["plan", str(job), "--gpus", "1", "--gpu", "h200"])
    # As a run: the vocabulary is that of the tokenizer, of bytes.
    parameters = 2 * 257 * 32 + 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32
    assert f"llama: {parameters:,} parameters on" in ranked.output
    # A model's own file is completed by nothing: what it leaves out is transformers' default, or further inside.
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    own = ["plan", str(tmp_path / "config.json"), "--gpus", "1", "--gpu", "h200"]
    assert "has vocab_size = None" in str(CliRunner().invoke(main.app, own).exception)
    (tmp_path / "run.json").write_text("{}")
    job.rename(tmp_path / "config.yaml")
    planned = CliRunner().invoke(
        main.app, ["plan", str(tmp_path), "--gpus", "1", "--gpu", "h200"]
    )
    assert planned.output == ranked.output


def test_a_mask_that_a_run_sets_for_its_rows_is_not_left_out_in_silence(
    config: Path, tmp_path: Path
) -> None:
    for rows, is_said in (
        ({"prompt": "a", "completion": "b"}, True),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            True,
        ),
        ({"text": "a"}, False),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
        asked = [
            "plan",
            str(config),
            "--gpus",
            "1",
            "--gpu",
            "h200",
            "--data.source",
            str(tmp_path / "rows.jsonl"),
        ]
        for keys, expected in (([], is_said), (["--data.document_mask", "false"], False)):
            planned = CliRunner().invoke(main.app, [*asked, *keys])
            assert ("planned without data.document_mask" in planned.stderr) is expected, (
                planned.output
            )
