"""`threefold plan --measure`: times scaled by layers that run on this machine's device."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from threefold.commands import main
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.plan.accelerators import ACCELERATORS, Accelerator
from threefold.run import layer_times

_VALUES: dict[str, Any] = {
    **{
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "head_dim": 16,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50000,
        "pad_token_id": 49999,
    },
}
_H100 = ACCELERATORS["h100-80gb"]
_CPU = Accelerator("cpu", 2**30, 10e9, 1e12, 0, 1e9)


def _config(**sections: dict[str, Any]) -> Config:
    return validate(
        {
            "model": {"config": _VALUES, "dtype": "float32"},
            "data": {"seq_len": 64},
            "train": {"compile": False},
            **sections,
        }
    )


class _Clock:
    """Steps take 1 s and so many times what is estimated of their layers, and by turns so many seconds more."""

    times = 1.0
    more: tuple[float, ...] = (0.0,)

    def __init__(self) -> None:
        self._turns = count()

    def seconds(self, config: Config) -> float:
        more = self.more[next(self._turns) % len(self.more)]
        return 1 + self.times * layer_times._estimate(config, _H100) + more


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(layer_times, "_step_of", lambda config, mesh: config)
    monkeypatch.setattr(layer_times, "_seconds", clock.seconds)
    return clock


@pytest.mark.parametrize("times", [0.5, 1.0, 1.7])
def test_layers_that_take_so_many_times_as_long(clock: _Clock, times: float) -> None:
    clock.times = times
    assert layer_times.slowness(_config(), _VALUES, _H100, kind="cpu") == pytest.approx(times)


def test_a_device_with_other_work_is_told(clock: _Clock) -> None:
    # Steps of the two models, by turns: the deeper one is now slower, now faster.
    clock.more = (0.0, 0.5, 0.5, 0.0)
    with pytest.raises(ConfigError, match="vary from") as caught:
        layer_times.slowness(_config(), _VALUES, _H100, kind="cpu")
    assert "leave --measure out" in caught.value.problems[0].fix


def test_the_layers_that_are_measured() -> None:
    few, many = layer_times._depths(
        _config(train={"micro_batch": 4, "global_batch": 64}), _VALUES, _H100
    )
    cut = {"hidden_size": 64, "vocab_size": 1024, "pad_token_id": None}
    for config, depth in ((few, 2), (many, 4)):
        values = config.model.config or {}
        assert {name: values[name] for name in (*cut, "num_hidden_layers")} == {
            **cut,
            "num_hidden_layers": depth,
        }
        assert (config.train.global_batch, config.train.micro_batch, config.data.seq_len) == (
            4,
            4,
            64,
        )
    # As many as there is room for.
    wide = {
        **_VALUES,
        "hidden_size": 8192,
        "intermediate_size": 32768,
        "num_attention_heads": 64,
        "head_dim": 128,
    }
    few, many = layer_times._depths(_config(), wide, _H100)
    assert [(each.model.config or {})["num_hidden_layers"] for each in (few, many)] == [1, 2]
    with pytest.raises(ConfigError, match="cannot be measured here: 80 GiB are not enough"):
        layer_times._depths(_config(), {**wide, "intermediate_size": 400_000}, _H100)
    # A window in every second layer: layers of both kinds.
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 16}
    few, many = layer_times._depths(_config(), {**_VALUES, **kinds}, _H100)
    assert (many.model.config or {})["layer_types"] == kinds["layer_types"][:4]


@pytest.mark.timing
def test_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "_SPREAD", math.inf)
    depths = [layer_times._cut(_config(), _VALUES, kept, 8) for kept in (1, 8)]
    monkeypatch.setattr(layer_times, "_depths", lambda *asked: depths)
    found = layer_times.slowness(_config(), _VALUES, _CPU, kind="cpu")
    assert math.isfinite(found) and found > 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    main._load(main._COMMANDS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_VALUES))
    return path


def _plan(model: Path, *arguments: str) -> Any:
    keys = (
        "--data.seq_len",
        "64",
        "--train.global_batch",
        "64",
        "--mesh.tp",
        "1",
        "--mesh.cp",
        "1",
    )
    return CliRunner().invoke(main.app, ["plan", str(model), *keys, *arguments])


def test_only_the_device_that_is_here_is_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--gpus", "8", "--gpu", "h100-80gb", "--measure")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device here" in str(_plan(model, *asked).exception)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert "the device here is 'NVIDIA A100-SXM4-80GB'" in str(_plan(model, *asked).exception)
    assert "--measure has no effect without --gpus" in str(_plan(model, "--measure").exception)


@pytest.mark.parametrize("gpu", ["h100-80gb", "l4"])
def test_times_are_scaled_by_what_was_measured(
    model: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda: f"NVIDIA {ACCELERATORS[gpu].sign} PCIe"
    )
    monkeypatch.setattr(layer_times, "slowness", lambda *asked, **settings: 100.0)
    published, here = (
        json.loads(_plan(model, "--gpus", "8", "--gpu", gpu, "--json", *more).output)
        for more in ((), ("--measure",))
    )
    assert here[0]["step_time_s"] > 5 * published[0]["step_time_s"]
    low, figure, high = (here[0][f"step_time_s{end}"] for end in ("_low", "", "_high"))
    assert high / figure == pytest.approx(1.11) and figure / low == pytest.approx(1.11)
    printed = _plan(model, "--gpus", "8", "--gpu", gpu, "--measure").output
    assert (
        "measured here: layers take 100.00 of the time that published speeds predict" in printed
    )
    assert "and layers were measured here" in printed
