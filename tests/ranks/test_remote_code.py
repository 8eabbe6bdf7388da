"""Models whose code lies in their own folder: code that was edited, differs between ranks, or has side effects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.keeping import write_corpus
from ranks.spawn import run_ranks
from threefold.errors import ThreefoldError

pytestmark = pytest.mark.ranks

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "architectures": ["OwnLlama"],
    "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnLlama"},
}
CODE = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM


class Mixed(nn.Module):
    def __init__(self, mlp, width):
        super().__init__()
        self.mlp = mlp
        self.calls = 0
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        {line}
        return self.mlp(x)


class OwnLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixed(layer.mlp, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Mixed):
            nn.init.zeros_(module.mean)
"""
PLAIN, LEAK = "pass", "x = x + 0.1 * x.roll(-1, dims=1)"
COUNTS = "self.calls += 1"
AVERAGES = "self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)"
AVERAGED_IN = AVERAGES + "; x = x + self.mean"


def _write(folder: Path, line: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "modeling_own.py").write_text(CODE.replace("{line}", line))
    return str(folder)


def _config(name: str, cache: str) -> Any:
    import transformers.dynamic_module_utils

    from threefold.config.loading import validate

    transformers.dynamic_module_utils.HF_MODULES_CACHE = f"{cache}/modules"
    os.environ["XDG_CACHE_HOME"] = cache
    return validate(
        {"model": {"name_or_path": name, "trust_remote_code": True}, "data": {"seq_len": 32}}
    )


def _admitted(names: list[str], caches: list[str]) -> str:
    from threefold.check.admit import admit
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load

    mesh = init_mesh(dp=len(names), device="cpu")
    config = _config(names[mesh.rank], caches[mesh.rank])
    try:
        return ": ".join(admit(config, load.read_config(config.model), mesh))
    except ThreefoldError as error:
        return str(error)


def test_a_kept_pass_admits_no_edited_code(tmp_path: Path) -> None:
    own, cache = _write(tmp_path / "own", PLAIN), [str(tmp_path / "cache")]
    first, again = (run_ranks(_admitted, 1, [own], cache)[0] for _ in range(2))
    assert " probes hold: " in first and not first.endswith("found before")
    assert again.endswith("found before")
    _write(tmp_path / "own", LEAK)
    assert (
        "fails the probe of causality on any mesh" in run_ranks(_admitted, 1, [own], cache)[0]
    )


def test_code_that_differs_between_two_hosts_is_named(tmp_path: Path) -> None:
    names = [_write(tmp_path / host, line) for host, line in (("a", PLAIN), ("b", COUNTS))]
    said = run_ranks(
        _admitted, 2, names, [str(tmp_path / "cache_a"), str(tmp_path / "cache_b")]
    )
    assert said[0] == said[1]
    assert said[0].startswith("the code of the model on rank 1 differs from rank 0's\n")


def _probed(name: str, cache: str) -> str:
    """Builds the model and probes its own forward: what is in its modules, before and after."""
    import random

    import torch

    from threefold.check.full_size import admit_full_size
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build

    config, mesh = _config(name, cache), init_mesh(device="cpu")

    def identity(shape_of: str, shape: Any, *, seed: int = 0) -> Any:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape_of)))

    outline = load.outline(load.read_config(config.model), config.model)
    weights = {
        key: (lambda key=key, value=value: identity(key, value.shape))
        for key, value in outline.state_dict().items()
    }
    model = build(config, load.read_config(config.model), mesh, weights=weights)

    def state() -> Any:
        modules = model.module.modules()
        attributes = [
            (module.calls, module.mean.clone())
            for module in modules
            if hasattr(module, "calls")
        ]
        return attributes, torch.get_rng_state(), random.getstate()

    before = state()
    try:
        said = admit_full_size(model, rows=3, seq_len=32, documents=False)
    except ThreefoldError as error:
        return str(error)
    assert said is not None
    after = state()
    assert after[0] and all(
        a[0] == b[0] and torch.equal(a[1], b[1])
        for a, b in zip(before[0], after[0], strict=True)
    )
    assert torch.equal(before[1], after[1]) and before[2] == after[2]
    return said[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (COUNTS, "its own forward: causal to token 32 of 32"),
        (AVERAGES, "its own forward: causal to token 32 of 32"),
        (AVERAGED_IN, "lets a row see the other rows of its micro-batch"),
    ],
    ids=["counts its calls", "a running mean", "a running mean that is used"],
)
def test_side_effects_of_a_probe_are_undone_or_refused(
    line: str, said: str, tmp_path: Path
) -> None:
    own = _write(tmp_path / "own", line)
    assert said in run_ranks(_probed, 1, own, str(tmp_path / "cache"))[0]


def _resumed(name: str, cache: str, run: str) -> str:
    """Saves a step of the run, after resuming it if it has been saved before; what it was refused for."""
    from safetensors.torch import save_file

    from ranks.keeping import Miniature
    from threefold.model import load

    asked = _config(name, cache).model
    outline = load.outline(load.read_config(asked), asked)
    weights = {key: torch.ones(each.shape) for key, each in outline.state_dict().items()}
    save_file(weights, f"{name}/model.safetensors", metadata={"format": "pt"})
    model = {"config": None, "name_or_path": name, "trust_remote_code": True}
    try:
        kept = Miniature((1, 1, 1, 1), run, model=model, data={"tokenizer": "bytes"})
    except ThreefoldError as error:
        return str(error)
    kept.advance(1)
    kept.checkpointer.save(kept.done, None, True)
    kept.checkpointer.saver.wait()
    return str(kept.done)


def _kept_by_a_loop(name: str, cache: str, folder: str, save: bool) -> str:
    """Saves a model of a custom loop, or loads it; what it was refused for."""
    import threefold

    _config(name, cache)
    mesh = threefold.init_mesh(device="cpu")
    model = threefold.load_model(
        name, mesh=mesh, dtype="float32", trust_remote_code=True, admission="off"
    )
    try:
        if save:
            threefold.save(folder, model=model, step=1)
        else:
            threefold.load(folder, model=model)
    except ThreefoldError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def _whole(name: str, cache: str, run: str) -> str:
    """Loads the model of a run to write with it, or to export it; what it was refused for."""
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.export.model_folder import load_whole

    _config(name, cache)
    try:
        load_whole(find(Path(run)), trust_remote_code=True)
    except ThreefoldError as error:
        return str(error)
    return ""


def test_a_run_goes_on_with_the_code_that_it_began_with_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    own, cache, run = _write(tmp_path / "own", PLAIN), str(tmp_path / "cache"), tmp_path / "run"
    config = {**CONFIG, "vocab_size": 257}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    assert [run_ranks(_resumed, 1, own, cache, str(run))[0] for _ in range(2)] == ["1", "2"]
    loop = str(tmp_path / "loop")
    assert not run_ranks(_kept_by_a_loop, 1, own, cache, loop, True)[0]
    assert not run_ranks(_kept_by_a_loop, 1, own, cache, loop, False)[0]
    # As transformers puts a tokenizer's code beside the model's once that is loaded too.
    for folder in {path.parent for path in Path(cache).rglob("modeling_own.py")}:
        (folder / "tokenization_own.py").write_text("SIZE = 1")
    assert not run_ranks(_whole, 1, own, cache, str(run))[0]
    (tmp_path / "own" / "modeling_own.py").write_text(CODE.replace("{line}", "x = 2 * x"))
    refused = run_ranks(_resumed, 1, own, cache, str(run))[0]
    assert refused == (
        f"the code of the model {own} has changed since {run}/checkpoints/step-00000002 was saved\n"
        "  expected: the code of the run: with other code the same weights compute something else\n"
        "  fix: restore it, or --model.revision COMMIT   (to continue anyway: threefold resume RUN --accept-changes)"
    )
    assert run_ranks(_whole, 1, own, cache, str(run))[0] == refused
    assert run_ranks(_kept_by_a_loop, 1, own, cache, loop, False)[0].startswith(
        f"the code of the model {own} has changed since {loop}/"
    )


def test_numbers_as_text_in_a_config_are_named(tmp_path: Path) -> None:
    from threefold.config.schema import ModelConfig
    from threefold.model import load

    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": "32"})
    )
    with pytest.raises(ThreefoldError) as caught:
        load.read_config(ModelConfig(name_or_path=str(tmp_path)))
    what, _, fix = str(caught.value).splitlines()
    assert what.startswith(
        f"the config of {str(tmp_path)!r} is refused by transformers: Validation error for field 'hid"
    )
    assert fix == "  fix: write the number without quotes"
