"""What a named model's files must hold: each refusal's text, and that nothing is trained from what was not written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.mesh.mesh import init_mesh
from threefold.model import load
from threefold.model.build import build

DOWN = "model.layers.1.mlp.down_proj.weight"
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def changed(
    plain: Path,
    to: Path,
    change: Callable[[State], State],
    config: dict[str, Any] | None = None,
) -> Path:
    shutil.copytree(plain, to)
    state = change(load_file(to / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, to / "model.safetensors"
    )
    if config:
        values = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps({**values, **config}))
    return to


def loaded(folder: Path, **model: Any) -> State:
    """The state of the model that a run on one process would begin with."""
    mesh = init_mesh(device="cpu")
    try:
        config = validate(
            {"model": {"name_or_path": str(folder), **model}, "train": {"seed": 3}}
        )
        return build(config, load.read_config(config.model), mesh).module.state_dict()
    finally:
        mesh.close()


def refused(folder: Path, **model: Any) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(folder, **model)
    return str(error.value).replace(str(folder), "MODEL")


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def with_tensor(name: str, tensor: Callable[[State], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, name: tensor(state)}


def test_plain_model_is_loaded_as_it_is(plain: Path) -> None:
    state, stored = loaded(plain), load_file(plain / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def test_missing_tensor(plain: Path, tmp_path: Path) -> None:
    assert refused(changed(plain, tmp_path / "m", without(DOWN))) == (
        f"model.name_or_path = 'MODEL' lacks 1 tensors of the model: {DOWN}\n"
        "  expected: every tensor of the model in its files: one that is missing would be trained from random numbers\n"
        f"  fix: use complete files; for weights that are meant to be new: --model.init_missing '['{DOWN}']'"
    )


def test_misnamed_tensor_and_the_nearest_name(plain: Path, tmp_path: Path) -> None:
    wrong = DOWN.replace("weight", "wieght")
    folder = changed(
        plain, tmp_path / "m", lambda state: {**without(DOWN)(state), wrong: state[DOWN]}
    )
    assert refused(folder).endswith(f"fix: rename {wrong} to {DOWN} in the files")


def test_names_of_a_wrapped_model(plain: Path, tmp_path: Path) -> None:
    folder = changed(
        plain,
        tmp_path / "m",
        lambda state: {f"module.{name}": each for name, each in state.items()},
    )
    assert "save the model inside the wrapper (model.module)" in refused(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_unexpected_tensor(plain: Path, tmp_path: Path, name: str) -> None:
    text = refused(
        changed(plain, tmp_path / "m", with_tensor(name, lambda state: torch.zeros(16)))
    )
    assert text.startswith(
        f"model.name_or_path = 'MODEL' has 1 tensors that the model does not have: {name}\n"
    )


@pytest.mark.parametrize(("name", "shape"), [("model.norm.weight", [1]), (DOWN, [1, 24])])
def test_shape_that_could_be_broadcast(
    plain: Path, tmp_path: Path, name: str, shape: list[int]
) -> None:
    text = refused(
        changed(plain, tmp_path / "m", with_tensor(name, lambda state: torch.ones(shape)))
    )
    assert f"has 1 tensors of another shape: {name} {shape} instead of" in text


def test_quantised_by_its_config(plain: Path, tmp_path: Path) -> None:
    quantised = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    text = refused(changed(plain, tmp_path / "m", lambda state: state, quantised))
    assert text.startswith("model.name_or_path = 'MODEL' is quantised (fp8)\n")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_read_as_weights(plain: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    text = refused(
        changed(plain, tmp_path / "m", with_tensor(DOWN, lambda state: state[DOWN].to(dtype)))
    )
    assert f"has 1 tensors that are not floating-point weights: {DOWN} (" in text


def test_codes_are_found_where_transformers_would_convert(plain: Path, tmp_path: Path) -> None:
    def change(state: State) -> State:
        return {**without("model.norm.weight")(state), DOWN: state[DOWN].to(torch.int8)}

    assert "not floating-point weights" in refused(changed(plain, tmp_path / "m", change))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(plain: Path, tmp_path: Path, value: float) -> None:
    def change(state: State) -> State:
        state[DOWN][1, 2] = value
        return state

    text = refused(changed(plain, tmp_path / "m", change))
    assert text.startswith(f"the model has 1 tensors with NaN or infinite values: {DOWN}\n")


def test_file_that_was_cut(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", lambda state: state)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert re.match(
        r"model\.name_or_path = 'MODEL': model\.safetensors cannot be read: ", refused(folder)
    )


def test_file_that_the_index_names_is_missing(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", lambda state: state)
    names = load_file(folder / "model.safetensors")
    weight_map = {name: "model-00001-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert "model-00001-of-00002.safetensors cannot be read" in refused(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_index_that_is_damaged(plain: Path, tmp_path: Path, content: str) -> None:
    folder = changed(plain, tmp_path / "m", lambda state: state)
    (folder / "model.safetensors.index.json").write_text(content)
    assert refused(folder).startswith(
        "model.name_or_path = 'MODEL': model.safetensors.index.json cannot be read: "
    )


def test_other_files_beside_the_model_are_not_its_weights(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", lambda state: state)
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors"
    )
    assert loaded(folder).keys() == loaded(plain).keys()


def test_base_with_one_other_byte_in_its_middle_is_another(plain: Path, tmp_path: Path) -> None:
    """Adapters are resumed beside the base that they began with, whose first and last MiB say little of it."""
    folder = changed(plain, tmp_path / "m", with_tensor("x", lambda _: torch.ones(3 << 18)))
    asked = validate({"model": {"name_or_path": str(folder)}}).model
    before = load.fingerprint(asked)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert load.fingerprint(asked) != before


def test_weights_that_are_meant_to_be_new_come_from_the_seed(
    plain: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "m", without("lm_head.weight"))
    first, again = (
        loaded(folder, init_missing=["lm_head.*"])["lm_head.weight"] for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first.isfinite().all() and first.abs().max() > 0
    assert "lacks 1 tensors" in refused(folder, init_missing=["model.norm.*"])


def test_patterns_without_files_have_no_effect() -> None:
    with pytest.raises(
        ConfigError, match=r"model.init_missing .* has no effect without model.name_or_path"
    ):
        validate({"model": {"init_missing": ["lm_head.*"]}})


@pytest.mark.parametrize("model_type", ["camembert", "xlm-roberta", "roberta"])
def test_no_memory_is_left_as_it_was_found(model_type: str, tmp_path: Path) -> None:
    """Every parameter is written, whatever a class says of its tied weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "m")
    state = loaded(tmp_path / "m")
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict().items()
    ):
        assert torch.equal(state[name], tensor), name
