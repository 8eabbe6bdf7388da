"""A key inside a mapping of `model.config` that nothing reads is refused by its path."""

from __future__ import annotations

from typing import Any

import pytest

from architectures import NAMES, NOT_RUN, config_of
from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.model import load

ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}


def _read(**values: Any) -> Any:
    return load.read_config(validate({"model": {"config": values}}).model)


@pytest.mark.parametrize(
    ("values", "path", "fix"),
    [
        (
            {"model_type": "llama", "rope_parameters": {"rope_tpye": "linear", "factor": 2.0}},
            "rope_parameters.rope_tpye",
            "did you mean rope_parameters.rope_type?",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {**ROPE, "rope_thta": 1e4}},
            },
            "rope_parameters.full_attention.rope_thta",
            "did you mean rope_parameters.full_attention.rope_theta?",
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "hiddensize": 64},
            },
            "text_config.hiddensize",
            "leave text_config.hiddensize out",
        ),
    ],
    ids=["rope", "kind of layer", "part"],
)
def test_an_unknown_key_is_named_with_its_path(
    values: dict[str, Any], path: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(**values)
    (problem,) = caught.value.problems
    assert problem.what.endswith(f"does not know: {path}") and problem.fix == fix


def test_keys_that_are_data_or_known_are_taken() -> None:
    assert _read(model_type="llama", rope_parameters=ROPE).rope_parameters["factor"] == 2.0
    assert (
        _read(
            model_type="llama", id2label={"0": "yes", "1": "no"}, label2id={"yes": 0, "no": 1}
        ).num_labels
        == 2
    )


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_RUN])
def test_no_key_of_a_default_config_is_refused(name: str) -> None:
    assert load.unknown_keys(name, config_of(name).to_dict()) == []
