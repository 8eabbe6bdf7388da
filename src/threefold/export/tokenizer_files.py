"""A run's tokenizer, with its chat template, in the folder of an export."""

import contextlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from threefold.checkpoint.chat_template import KEY, template_of
from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.config.paths import tokenizer_name
from threefold.config.schema import Config
from threefold.data.chat.formats import RowError
from threefold.data.chat.labeller import chat_template, encoder_of
from threefold.data.text.source import Labels
from threefold.data.tokens import byte_backend, load_tokenizer
from threefold.errors import ThreefoldError


def save_tokenizer(checkpoint: Checkpoint, config: Config, to: Path) -> list[int]:
    """Writes the tokenizer that the run trained with to the folder `to`; of a custom loop that of its model, if any.

    Returns the ids at which its model ends what it writes: of a document and, after conversations, of a turn.
    """
    try:
        tokenizer = tokenizer_of(config)
    except (OSError, ValueError):
        if "loop" in checkpoint.manifest():
            return []  # it has trained on ids, by whatever tokenizer
        raise
    if (template := template_of(checkpoint, config)) is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(to)
    ends: list[int] = []
    with contextlib.suppress(ThreefoldError, RowError):  # it names none
        saved = load_tokenizer(str(to))
        ends.append(saved.end_id)
        if checkpoint.manifest().get(KEY) is not None:
            labels = Labels(template_variables=config.data.template_variables)
            encoder = encoder_of(saved, labels, "last", chat_template(saved, labels))
            ends.append(encoder.end_of_turn([{"role": "user", "content": "-"}]))
    return ends


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of a run in transformers' form."""
    name, _ = tokenizer_name(config)
    revision = config.model.revision if name == config.model.name_or_path else None
    return (
        byte_tokenizer()
        if name == "bytes"
        else AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    )


def byte_tokenizer() -> Any:
    """Returns the tokenizer `bytes` in transformers' form: the same ids, with 256 as the end token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
