"""Text generation with a trained model: the complete model of a checkpoint, in one process."""

from typing import Any

import torch

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.data.tokens import Tokenizer
from threefold.errors import RunError
from threefold.export.model_folder import load_whole


def generate_sample(
    checkpoint: Checkpoint, tokenizer: Tokenizer, prompt: list[int], *, num_tokens: int
) -> str:
    """Returns the prompt and its continuation by the model of this process' own run, sampled with a fixed seed."""
    model = load_own(checkpoint)
    torch.manual_seed(0)
    ids = continued(model, prompt, num_tokens=num_tokens, end_id=tokenizer.end_id)
    return tokenizer.decode([*prompt, *ids])


def load_own(checkpoint: Checkpoint) -> Any:
    """Returns the complete model of this user's own run, whose code is trusted if the run trusted it."""
    trusted = bool(checkpoint.manifest()["config"]["model"]["trust_remote_code"])
    return load_whole(checkpoint, trust_remote_code=trusted)[0]


def continued(model: Any, prompt: list[int], *, num_tokens: int, end_id: int) -> list[int]:
    """Returns the ids that a model writes after a prompt, up to the end token, sampled.

    Raises:
        RunError: transformers cannot generate with this architecture, with its cache or without.
    """
    # Some layers' caches have no length (models of state layers alone).
    for use_cache in (True, False):
        try:
            return _generated(
                model, prompt, num_tokens=num_tokens, end_id=end_id, use_cache=use_cache
            )
        except Exception as error:  # whatever a model's code may raise
            failure = error
    reason = " ".join(f"{type(failure).__name__}: {failure}".split())
    raise RunError(
        f"{model.config.model_type!r} cannot write a sample: {reason[:300]}",
        expected="an architecture that transformers' generate() knows; training does not need it",
        fix="--log.sample_tokens 0, and leave eval.sample out",
    ) from failure


@torch.no_grad()
def _generated(
    model: Any, prompt: list[int], *, num_tokens: int, end_id: int, use_cache: bool
) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=True,
        temperature=0.8,
        use_cache=use_cache,
        pad_token_id=end_id,
        eos_token_id=end_id,
    )
    return [int(id) for id in ids[0, len(prompt) :]]
