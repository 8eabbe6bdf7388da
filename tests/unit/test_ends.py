"""The embedding, and the last norm with the head, apart from the layers: of the model and of the planner the same."""

from __future__ import annotations

import pytest

from architectures import config_of
from threefold.model import load
from threefold.model.data_parallel import _ends
from threefold.model.reduced import shallow
from threefold.plan import choices
from threefold.plan.decoder import decoder_of
from threefold.plan.families import FAMILIES
from threefold.plan.units import units_of


@pytest.mark.parametrize(
    ("model_type", "tied"), [*((name, False) for name in sorted(FAMILIES)), ("llama", True)]
)
def test_the_planner_counts_what_the_model_gathers(model_type: str, tied: bool) -> None:
    config = config_of(model_type, tie_word_embeddings=tied, num_hidden_layers=2)
    model = load.outline(config)
    found = [
        sum(
            each.numel() for module in end if module is not None for each in module.parameters()
        )
        for end in _ends(model, load.layers_of(model))
    ]
    units = units_of(decoder_of(config.to_dict()), 1, 8)
    assert found == [each.size for each in (units.embedding, units.head) if each.size]
    assert len(found) == (0 if tied or model_type == "olmo" else 2)  # whose norm has no weights
    whole = sum(each.numel() for each in model.parameters())
    assert units.whole.size == whole


@pytest.mark.parametrize(
    ("model_type", "last"),
    [
        ("deepseek_v4", "DeepseekV4RMSNorm"),
        ("gemma4_text", "Gemma4RMSNorm"),
        ("phi4_multimodal", "Phi4MultimodalRMSNorm"),
        # Nothing, or what may not be called at all, comes next to the layers.
        ("fuyu", None),
        ("qwen4_exp_text", None),
        ("opt", None),
    ],
)
def test_the_norm_behind_the_layers_is_the_last(
    model_type: str, last: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "UNIT_BYTES", 1)
    model = load.outline(shallow(config_of(model_type, tie_word_embeddings=False)))
    assert [
        type(module).__name__ for module, head in _ends(model, load.layers_of(model)) if head
    ] == [last] * bool(last)
