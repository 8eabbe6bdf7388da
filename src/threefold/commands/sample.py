"""`threefold sample`: text that a run's model writes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from threefold import jsonl
from threefold.commands.arguments import AsJson
from threefold.commands.run_argument import RunOrCheckpoint, run_here
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.checkpoint.checkpoint_folder import Checkpoint
    from threefold.config.schema import Config
    from threefold.data.tokens import Tokenizer


def command(
    run: RunOrCheckpoint,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to write.")] = 200,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer each line of the input as the assistant, until the input ends.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write text with a run's model: threefold sample RUN [--prompt TEXT | --chat] [--tokens N].

    One process reads the newest checkpoint, or the one that is named, and samples with a fixed seed.
    """
    from threefold.checkpoint.checkpoint_folder import damaged, find
    from threefold.commands.arguments import load_config
    from threefold.config.paths import run_and_checkpoint
    from threefold.run.process import quieten_libraries
    from threefold.run.sources import tokenizer_of

    quieten_libraries()
    place = run_here(run, state=True)
    folder, _ = run_and_checkpoint(place)
    config = load_config([str(folder / "config.yaml")]).config
    checkpoint = find(place)
    if (reason := checkpoint.damage()) is not None:
        raise damaged(checkpoint, reason)
    tokenizer = tokenizer_of(config)
    if chat:
        if as_json:
            raise ConfigError(
                "--json has no effect with --chat",
                expected="one prompt",
                fix="leave out --json",
            )
        if prompt != "\n":
            raise ConfigError(
                "--chat and --prompt are both given",
                expected="one of them",
                fix="leave out --prompt",
            )
        return _converse(config, checkpoint, tokenizer, num_tokens=tokens)
    if not (ids := tokenizer.encode_batch([prompt])[0].tolist()):
        raise ConfigError(
            "--prompt has no token",
            expected="text to continue",
            fix="--prompt 'Once upon a time'",
        )
    from threefold.export.generation import generate_sample

    text = generate_sample(checkpoint, tokenizer, ids, num_tokens=tokens)
    answer = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "prompt": prompt,
        "text": text,
    }
    typer.echo(jsonl.as_json(answer) if as_json else text)


def _converse(
    config: Config, checkpoint: Checkpoint, tokenizer: Tokenizer, *, num_tokens: int
) -> None:
    """Prints an answer to each line of the input; the conversation grows with them."""
    import torch

    from threefold.checkpoint.chat_template import template_of
    from threefold.data.chat.formats import Message, RowError
    from threefold.data.chat.labeller import chat_template, encoder_of
    from threefold.export.generation import continued, load_own
    from threefold.run.sources import sources_of

    labels = next(iter(sources_of(config).values())).labels
    if (template := chat_template(tokenizer, labels, template_of(checkpoint, config))) is None:
        raise ConfigError(
            f"--chat: the tokenizer {tokenizer.name!r} has no chat template, and the run's config names none",
            expected="data.chat_template, or a tokenizer with one",
            fix="threefold sample RUN --prompt 'Once upon a time'",
        )
    encoder = encoder_of(tokenizer, labels, "last", template)
    model = load_own(checkpoint)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    messages: list[Message] = []
    torch.manual_seed(0)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        messages.append({"role": "user", "content": line})
        try:
            ids = encoder.prompt(messages)
            end_id = encoder.end_of_turn(messages)
        except RowError as error:
            raise ConfigError(
                f"--chat: {error.what}", expected=error.expected, fix="rephrase it"
            ) from None
        if isinstance(longest, int) and len(ids) + num_tokens > longest:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens, and the model supports {longest:,} positions",
                expected=f"room for {num_tokens:,} more",
                fix="start over, or fewer --tokens",
            )
        new_ids = continued(model, ids, num_tokens=num_tokens, end_id=end_id)
        answer = tokenizer.decode([id for id in new_ids if id != end_id]).strip()
        typer.echo(answer)
        messages.append({"role": "assistant", "content": answer})
