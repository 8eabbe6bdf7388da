"""Text generated after some prompts at each evaluation (`eval.sample`), in RUN/samples.jsonl and on the screen.

All ranks write together, as `Model.generate` does. A replayed step appends its lines again; the last ones count.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.config.yaml_text import as_yaml
from threefold.data.chat.formats import Message, RowError
from threefold.data.chat.labeller import chat_template, encoder_of
from threefold.data.rows.concat import IGNORED
from threefold.data.rows.known_rows import parts_of
from threefold.data.tokens import for_texts
from threefold.errors import ConfigError, RunError
from threefold.export.generation import continued, generate_sample
from threefold.jsonl import MetricsFile, Values
from threefold.run.assemble import Built
from threefold.run.sources import sources_of
from threefold.run.terminal import SAMPLE, Screen
from threefold.training.progress import Progress

FILE = "samples.jsonl"
_LARGEST_SAMPLED = 500_000_000
_LONGEST_PROMPT = 256
_SHOWN = 200


class Prompt(NamedTuple):
    """A prompt as given, its token ids, and the token that ends the text generated after it."""

    text: str
    ids: list[int]
    end_id: int


class EvalSamples:
    """Writes samples after a step; every rank calls it, after the same step."""

    def __init__(self, run: Built, *, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self.progress = Progress()
        """where this rank is, in the steps too."""
        self._prompts = [
            Prompt(*each) for each in run.mesh.share("prompts", lambda: prompts_of(run))
        ]

    def __call__(self, step: int) -> None:
        self.progress.enter("sample")
        run, lines = self._run, []
        for text, ids, end_id in self._prompts:
            self.progress.tick()  # it may take long
            try:
                new_ids = continued(
                    run.model, ids, num_tokens=run.config.log.sample_tokens, end_id=end_id
                )
            except RunError as error:  # a sample never ends training
                self._say(f"no sample: {error}")
                break
            written = run.tokenizer.decode([id for id in new_ids if id != end_id])
            lines.append({"step": step, "prompt": text, "text": written})
            self._say(f"  | {_short(text)} -> {_short(written)}")
        run.mesh.share("samples", lambda: append_samples(run, lines))


def show_sample(console: Screen, run: Built) -> None:
    """Prints what the trained model writes after the beginning of a row, and appends it to RUN/samples.jsonl."""
    if run.num_parameters > _LARGEST_SAMPLED:
        console.print(
            f"no sample: {run.num_parameters:,} parameters are too many for one process after training"
        )
        return
    checkpoint = CheckpointFolder(run.folder.path).newest()
    assert checkpoint is not None
    row = run.rows.rows(np.zeros(1, dtype=np.int64))
    # Before an answer, if there is one.
    before = int(np.argmax(row["labels"][0] != IGNORED)) + 1
    if not 1 < before <= _LONGEST_PROMPT:
        before = max(1, min(48, run.config.data.seq_len // 2))
    prompt = row["input_ids"][0][:before].tolist()
    try:
        text = generate_sample(
            checkpoint, run.tokenizer, prompt, num_tokens=run.config.log.sample_tokens
        )
    except RunError as error:  # the run is done, and saved
        console.print(f"no sample: {error}")
        return
    begin = run.tokenizer.decode(prompt)
    append_samples(
        run, [{"step": checkpoint.step, "prompt": begin, "text": text.removeprefix(begin)}]
    )
    console.print("a sample (the prompt, then what the model wrote):")
    console.print("\n".join(f"{SAMPLE}{line}" for line in text.splitlines()))


def append_samples(run: Built, lines: Sequence[Values]) -> None:
    """Appends what the model has written to RUN/samples.jsonl: step, prompt and text of each; one rank calls it."""
    file = MetricsFile(
        run.folder.path / FILE, continue_on_error=run.config.checkpoint.on_error == "continue"
    )
    for line in lines:
        file.log(line)
    file.close()


def prompts_of(run: Built) -> list[Prompt]:
    """The prompts of `eval.sample`: of a run on conversations as the user's first turn, in the chat template.

    Raises:
        ConfigError: one has no token, is too long for the model, or the template refuses it.
    """
    config, labels = run.config, next(iter(sources_of(run.config).values())).labels
    template = None
    masks = [part.rows.store.loss_mask for part in parts_of(run.rows)]
    if any(mask is not None and mask.templated for mask in masks):
        template = chat_template(run.tokenizer, labels, run.checkpointer.template)
    longest = run.model.positions
    prompts = []
    for number, prompt in enumerate(config.eval.sample):
        what = f"eval.sample[{number}] = {as_yaml(prompt)}"
        if template is None:
            ids = for_texts(run.tokenizer, labels).encode_batch([prompt])[0].tolist()
            end_id = run.tokenizer.end_id
        else:
            encoder = encoder_of(run.tokenizer, labels, "last", template)
            turns: list[Message] = [{"role": "user", "content": prompt}]
            try:
                ids = encoder.prompt(turns)
                end_id = encoder.end_of_turn(turns)
            except RowError as error:
                raise ConfigError(
                    f"{what}: {error.what}", expected=error.expected, fix="another prompt"
                ) from None
        if not ids:
            raise ConfigError(
                f"{what} has no token",
                expected="text to continue",
                fix="--eval.sample '[Once upon]'",
            )
        if 0 < longest < len(ids) + config.log.sample_tokens:
            raise ConfigError(
                f"{what} has {len(ids):,} tokens, and the model supports {longest:,} positions",
                expected=f"room for log.sample_tokens = {config.log.sample_tokens:,} more",
                fix=f"a shorter prompt, or --log.sample_tokens {max(1, longest - len(ids))}",
            )
        prompts.append(Prompt(prompt, ids, end_id))
    return prompts


def _short(text: Any) -> str:
    """A text in one line, without what a terminal could take for commands."""
    shown = repr(text)[1:-1]
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
