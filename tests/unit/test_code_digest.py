"""The digest of a model's code: another one for whatever else computes, none for code of unknown origin."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from threefold.check import probes
from threefold.check.admission_cache import CodeDigest, code_digest
from threefold.model.context_parallel.local_attention import BatchMasks
from threefold.model.load import outline

_SOURCE = (
    "from torch import nn\nimport {helper}\n\nclass Own(nn.Module):\n    def "
    "forward(self, x):\n        return x\n"
)


@pytest.fixture(scope="module")
def llama() -> Any:
    return outline(LlamaConfig(num_hidden_layers=1))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ModuleType]:
    """A module of one's own that defines a model and imports another file."""
    for name, text in (
        ("own_helper", "SCALE = 1\n"),
        ("own_model", _SOURCE.format(helper="own_helper")),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    yield module
    del sys.modules["own_model"], sys.modules["own_helper"]


def test_the_same_code_has_the_same_digest(llama: Any) -> None:
    first = code_digest(llama, probes)
    assert first.whole is not None and first.whole != first.classes
    assert code_digest(outline(LlamaConfig(num_hidden_layers=2)), probes) == first


@pytest.mark.parametrize("edited", ["own_model", "own_helper"])
def test_one_changed_byte_of_a_source_is_another_digest(
    edited: str, own: ModuleType, tmp_path: Path
) -> None:
    before = code_digest(own.Own())
    assert before.classes is not None
    path = tmp_path / f"{edited}.py"
    path.write_text(path.read_text() + "#")
    assert code_digest(own.Own()).classes not in (None, before.classes)


def _identity(*values: Any) -> Any:
    return values[0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama.LlamaMLP, "forward"),
        (nn.Linear, "forward"),
        (F, "silu"),
        (BatchMasks, "mask"),
    ],
)
def test_a_patched_class_has_no_digest(
    owner: Any, name: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, _identity)
    assert code_digest(llama, probes) == CodeDigest(None, None)


def test_a_patched_instance_has_no_digest(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.model.layers[0].mlp, "forward", _identity)
    assert code_digest(llama) == CodeDigest(None, None)


def test_a_function_of_another_model_in_its_place_is_another_digest(
    llama: Any, monkeypatch: Any
) -> None:
    before = code_digest(llama)
    monkeypatch.setattr(modeling_llama, "rotate_half", modeling_gptj.rotate_every_two)
    after = code_digest(llama)
    assert after.whole not in (None, before.whole)


def test_a_registered_attention_is_another_digest(llama: Any) -> None:
    before = code_digest(llama)
    AttentionInterface.register("own", _identity)
    try:
        assert code_digest(llama).whole not in (None, before.whole)
    finally:
        del AttentionInterface._global_mapping["own"]


def test_a_class_without_a_file_has_no_digest() -> None:
    namespace: dict[str, Any] = {"__name__": "typed_in", "nn": nn}
    exec("class Own(nn.Module):\n    def forward(self, x):\n        return x\n", namespace)
    assert code_digest(namespace["Own"]()) == CodeDigest(None, None)


def test_a_hook_on_all_modules_has_no_digest(llama: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert code_digest(llama) == CodeDigest(None, None)
    finally:
        handle.remove()
