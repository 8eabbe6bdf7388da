"""From rows of instruction data to labelled tokens, by the settings of the config: what the readers of rows call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from threefold.data.conversations.formats import Columns, Example, RowError, columns_of, example_of
from threefold.data.conversations.preference import labelled_pair
from threefold.data.conversations.targets import TRAIN_ON, Encoder, NoTargetError
from threefold.data.conversations.template import ChatTemplate
from threefold.data.text.source import NO_END, PREFERENCE, Labelled, LabellerFor, Labels, ReadLog, Source
from threefold.data.tokens import Tokenizer, for_texts
from threefold.errors import ConfigError, DataError

# What is learnt of a format, unless it is said.
_DEFAULT = {"chat": "assistant", "prompt_completion": "completion", PREFERENCE: "completion"}
# What may be learnt of a format. Of a pair's prompt nothing is, so that only its answers are compared.
_LEARNT = {
    "chat": TRAIN_ON,
    "prompt_completion": tuple(each for each in TRAIN_ON if each != "last"),
    PREFERENCE: ("completion",),
}
_LONGEST = 400
# A text that no template writes.
_ANSWER = "Aqx"


@dataclass(frozen=True)
class RowLabeller:
    """Makes the documents of rows with these columns."""

    read: Columns
    encoder: Encoder
    tokenizer: str
    skip_empty: bool = False

    @cached_property
    def description(self) -> str:
        end = "" if self.encoder.train_on_end else " without its end"
        # Of a prompt and a completion, it is not known before they are read whether they are texts.
        if not end and ("prompt" not in self.read.names) and not ends_turns(self.encoder):
            end = NO_END
        return f"{self.read}, learnt: {self.encoder.train_on}{end}"

    @property
    def columns(self) -> Sequence[str]:
        return [self.read.fields.get(name, name) for name in self.read.all_names]

    @cached_property
    def recipe(self) -> str:
        made = self.encoder
        template = made.template
        shown = None if template is None else [template.source, template.special, template.variables, template.today]
        parts: list[Any] = [
            self.read.format,
            self.read.names,
            dict(self.read.fields),
            self.tokenizer,
            shown,
            self.skip_empty,
        ]
        parts += [made.train_on, made.train_on_end, made.control_ids, made.bos_id]
        return f"labels 1 {hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()}"

    def documents(self, row: Any, log: ReadLog) -> Sequence[Labelled] | tuple[str, str]:
        """As `Labeller`."""
        if not isinstance(row, dict):
            return f"a JSON {type(row).__name__}, not an object", "one JSON object per line"
        log.num_rows += 1
        log.num_with_field += 1
        try:
            if self.read.format == PREFERENCE:
                return labelled_pair(row, self.read, self.encoder)
            return [self.encoder.labelled(example_of(row, self.read))]
        except NoTargetError as error:
            if self.skip_empty:
                log.num_skipped += 1
                return []
            return error.what, f"{error.expected}   (or --data.skip_empty_targets true)"
        except RowError as error:
            # Roles and what a template says may be as long as a row.
            return shorten(error.what), error.expected


def shorten(text: str) -> str:
    """The beginning of a text that is too long for an error."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def labeller_for(source: Source, tokenizer: Tokenizer) -> LabellerFor:
    """Chooses the labeller of a source's rows by their columns; a ConfigError if these are of several formats."""
    labels = source.labels

    def choose(names: Sequence[str]) -> RowLabeller | None:
        if format_of(names, source) == "text":
            return None
        read = columns_of(names, format=labels.format, fields=labels.fields, text_field=source.text_field)
        train_on = labels.train_on or _DEFAULT[read.format]
        if train_on not in (known := _LEARNT[read.format]):
            raise ConfigError(
                f"data.train_on = {train_on!r} with rows of the format {read.format}",
                expected=f"one of {', '.join(known)}" if len(known) > 1 else f"{known[0]}: the two answers",
                fix=f"--data.train_on {_DEFAULT[read.format]}",
            )
        template = chat_template(tokenizer, labels)
        if template is None and read.format == "chat":
            raise ConfigError(
                f"{source.name} has conversations, and the tokenizer {tokenizer.name!r} has no chat template",
                expected="a chat template, which says how a conversation becomes text",
                fix="--data.chat_template FILE   (jinja, as chat_template.jinja of a model on the Hub)",
            )
        encoder = encoder_of(tokenizer, labels, train_on, template)
        return RowLabeller(read, encoder, tokenizer.fingerprint, labels.skip_empty_targets)

    return choose


def format_of(names: Sequence[str], source: Source) -> str:
    """The format of rows with these columns; `text` also if `auto` knows none: its errors name the field.

    Raises:
        ConfigError: the columns are of several formats, or not those of the one asked for.
    """
    labels = source.labels
    try:
        return columns_of(names, format=labels.format, fields=labels.fields, text_field=source.text_field).format
    except ConfigError as error:
        what = error.problems[0].what
        none = what.startswith("data.format = ") and " are those of " not in what
        if none and labels.format in ("text", "auto"):
            return "text"
        raise


def template_source(tokenizer: Tokenizer, labels: Labels) -> str | None:
    """The text of the chat template of a tokenizer, or of the file that is named; None without any."""
    return _own_template(tokenizer)[0] if labels.chat_template is None else template_file(labels.chat_template)


def chat_template(tokenizer: Tokenizer, labels: Labels, source: str | None = None) -> ChatTemplate | None:
    """The chat template of a tokenizer, or the file that is named, or `source` instead; None without any."""
    own, special = _own_template(tokenizer)
    if source is None:
        source = own if labels.chat_template is None else template_file(labels.chat_template)
    if source is None:
        return None
    _refuse_wrong(source, labels)
    try:
        date.fromisoformat(labels.chat_date or "2000-01-01")
    except ValueError as error:
        raise ConfigError(
            f"data.chat_date = {labels.chat_date!r}: {error}",
            expected="a day: year, month, day",
            fix=f"--data.chat_date {datetime.now(UTC).date()}",
        ) from error
    found = ChatTemplate(source, special, labels.template_variables, labels.chat_date)
    if found.prints_date and labels.chat_date is None:
        raise ConfigError(
            "the chat template prints today's date, which is another one tomorrow",
            expected="one date for all rows, so that the same rows give the same tokens on any day",
            fix=f"--data.chat_date {datetime.now(UTC).date()}",
        )
    return found


def template_file(name: str) -> str:
    """The chat template in a file; a DataError if it cannot be read."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template = {name!r} cannot be read: {error}",
            expected="a file with a chat template in jinja",
            fix="check the path",
        ) from error


def encoder_of(tokenizer: Tokenizer, labels: Labels, train_on: str, template: ChatTemplate | None) -> Encoder:
    """What encodes the examples of a source with these labels."""
    return Encoder(
        _backend(tokenizer),
        tokenizer.end_id,
        template,
        train_on,
        train_on_end=labels.train_on_end,
        control_ids=labels.control_tokens == "ids",
        bos_id=for_texts(tokenizer, bos=labels.bos, control_tokens=labels.control_tokens).bos_id,
    )


def ends_turns(encoder: Encoder) -> bool:
    """Whether what is learnt of an answer has an end, or that cannot be told."""
    said = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER})
    try:
        answered = replace(encoder, train_on="assistant", train_on_end=True).labelled(Example(said))
    except RowError:
        return True
    learnt = str(encoder.backend.decode(answered.ids[answered.targets].tolist(), skip_special_tokens=False))
    return _ANSWER not in learnt or bool(learnt.rpartition(_ANSWER)[2].strip())


def _refuse_wrong(source: str, labels: Labels) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(source)
    except TemplateSyntaxError as error:
        name = labels.chat_template or "the tokenizer's chat template"
        raise DataError(
            f"{name}, line {error.lineno}: {error.message}", expected="a chat template in jinja", fix="correct the line"
        ) from error


def _own_template(tokenizer: Tokenizer) -> tuple[str | None, dict[str, str]]:
    """The tokenizer's own template and the special tokens that templates may name."""
    folder = getattr(tokenizer, "folder", None)
    if folder is None:
        return None, {"eos_token": "<|end|>"}
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    found = loaded.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    return found, {name: str(token) for name, token in loaded.special_tokens_map.items() if not isinstance(token, list)}


def _backend(tokenizer: Tokenizer) -> Any:
    from threefold.data.tokens import byte_backend

    backend = byte_backend() if tokenizer.name == "bytes" else getattr(tokenizer, "backend", None)
    if not hasattr(backend, "encode_batch_fast"):
        raise DataError(
            f"data.tokenizer = {tokenizer.name!r} is written in Python, and does not say where a token lies",
            expected="a tokenizer with a tokenizer.json, for rows with labels",
            fix="AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER), then --data.tokenizer FOLDER",
        )
    return backend
