"""A sample is asked beside training: what cannot write one is said in three parts, and never as a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threefold.config.loading import validate
from threefold.errors import RunError
from threefold.export.generation import continued
from threefold.export.tokenizer_files import byte_tokenizer, save_tokenizer, tokenizer_of


class _Model:
    def __init__(self, *works_with: bool) -> None:
        self.config, self._works_with = SimpleNamespace(model_type="some"), works_with

    def generate(self, ids: torch.Tensor, *, use_cache: bool, **_: Any) -> torch.Tensor:
        if use_cache not in self._works_with:
            raise ValueError("this cache has\nno length")
        return torch.cat([ids, torch.tensor([[5 + use_cache]])], dim=1)


def test_without_a_cache_where_the_cache_fails() -> None:
    assert continued(_Model(True, False), [1, 2], num_tokens=1, end_id=0) == [6]
    assert continued(_Model(False), [1, 2], num_tokens=1, end_id=0) == [5]


def test_what_cannot_generate_is_said() -> None:
    with pytest.raises(
        RunError,
        match="'some' cannot write a sample: ValueError: this cache has no length\n  expected",
    ):
        continued(_Model(), [1], num_tokens=1, end_id=0)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(("recorded", "ends"), [(None, [256]), ("digest", [256, 258])])
def test_what_was_learnt_ends_where_a_document_does_and_after_conversations_a_turn(
    recorded: str | None, ends: list[int], tmp_path: Path
) -> None:
    """A program that generates stops at what the export names: the base's own end is no turn's."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "base")
    checkpoint: Any = SimpleNamespace(
        manifest=lambda: {"chat_template": recorded}, path=tmp_path / "run/checkpoints/step"
    )
    config = validate({"data": {"tokenizer": str(tmp_path / "base")}})
    assert save_tokenizer(checkpoint, config, tmp_path / "to") == ends


def test_a_tokenizer_beside_code_asks_nobody_whether_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    code = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert len(tokenizer_of(validate({"data": {"tokenizer": str(tmp_path)}}))) == 257
    assert asked == []
