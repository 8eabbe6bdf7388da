"""A checkpoint as a Hugging Face folder, and a sample of what it writes: one process, whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from threefold.checkpoint import dcp
from threefold.checkpoint.layout import Checkpoint, find
from threefold.config import Config
from threefold.config_loading import validate
from threefold.data.tokens import Tokenizer
from threefold.errors import ConfigError


def export(run: Path, to: Path) -> str:
    """Writes the checkpoint of a run (or a checkpoint itself) to a new folder; returns what was written.

    Raises:
        CheckpointError: no complete checkpoint is there. ConfigError: the folder is not empty.
    """
    if to.exists() and any(to.iterdir()):
        raise ConfigError(
            f"{to} is not empty",
            expected="a new or empty folder, so that no other model's files are mixed in",
            fix="--to ANOTHER_FOLDER",
        )
    transformers.utils.logging.disable_progress_bar()
    checkpoint = find(run)
    model, config = load_whole(checkpoint)
    model.save_pretrained(to)
    _save_tokenizer(config, to)
    return f"step {checkpoint.step} of {run}, {sum(p.numel() for p in model.parameters()):,} parameters"


def load_whole(checkpoint: Checkpoint) -> tuple[Any, Config]:
    """The checkpoint's model on the CPU, whole, and the config it was trained with."""
    manifest = checkpoint.manifest()
    config = validate(manifest["config"])
    values = dict(manifest["architecture"])
    if config.model.name_or_path is not None:
        architecture = AutoConfig.from_pretrained(
            config.model.name_or_path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
    else:
        architecture = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        architecture, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )
    dcp.load_weights(checkpoint.state, model)
    return model.eval(), config


def _save_tokenizer(config: Config, to: Path) -> None:
    name = config.data.tokenizer or config.model.name_or_path or "bytes"
    if name == "bytes":
        byte_tokenizer().save_pretrained(to)
        return
    revision = config.model.revision if name == config.model.name_or_path else None
    AutoTokenizer.from_pretrained(name, revision=revision).save_pretrained(to)


def byte_tokenizer() -> Any:
    """The tokenizer `bytes` as transformers knows tokenizers: the same ids, 256 as the end token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    characters = _byte_characters()
    backend = Backend(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def _byte_characters() -> list[str]:
    # The printable character that stands for each byte in byte-level tokenizers (GPT-2): itself where it is printable
    # in Latin-1, else the next free code point from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, free = [], 256
    for byte in range(256):
        characters.append(chr(byte) if byte in printable else chr(free))
        free += byte not in printable
    return characters


def generate_sample(checkpoint: Checkpoint, tokenizer: Tokenizer, prompt: list[int], *, num_tokens: int) -> str:
    """The prompt and what the checkpoint's model continues it with, sampled with a fixed seed."""
    model, _ = load_whole(checkpoint)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.8,
            use_cache=True,
            pad_token_id=tokenizer.end_id,
            eos_token_id=tokenizer.end_id,
        )
    return tokenizer.decode(ids[0].tolist())
