"""From rows of instruction data to labelled tokens, by the settings of the config; called by the readers of rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any

from threefold.config.paths import expanded
from threefold.data.chat.formats import (
    Columns,
    Example,
    RowError,
    columns_of,
    example_of,
    formats_in,
)
from threefold.data.chat.loss_mask import Encoder
from threefold.data.chat.preference import labelled_pair
from threefold.data.chat.template import ChatTemplate
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import (
    PREFERENCE,
    TRAIN_ON,
    Documents,
    LabellerFor,
    Labels,
    LossMask,
    ReadLog,
    Source,
    kind_of,
)
from threefold.data.tokens import Tokenizer, for_texts
from threefold.errors import ConfigError, DataError

# What is trained on by default, by format.
_DEFAULT = {"chat": "assistant", "prompt_completion": "completion", PREFERENCE: "completion"}
# Trainable parts. Never a pair's prompt, so that only its answers are compared.
_ALLOWED = {
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

    @cached_property
    def loss_mask(self) -> LossMask:
        read = self.read
        # Whether a prompt and a completion are texts is not known before they are read.
        end = "trained" if "prompt" in read.names or ends_turns(self.encoder) else "missing"
        templated = read.format == "chat" or "instruction" in read.names
        return LossMask(
            read.format, read.theirs(read.names), self.encoder.train_on, end, templated
        )

    @property
    def columns(self) -> Sequence[str]:
        return self.read.theirs(self.read.all_names)

    @cached_property
    def recipe(self) -> str:
        made = self.encoder
        template = made.template
        shown = (
            None
            if template is None
            else [template.source, template.special, template.variables]
        )
        parts: list[Any] = [
            self.read.format,
            self.read.names,
            dict(self.read.fields),
            self.tokenizer,
            shown,
        ]
        parts += [made.train_on, made.lost_texts, made.control_ids, made.bos_id]
        return f"labels 3 {content_digest(json.dumps(parts, sort_keys=True, default=str))}"

    def documents(self, row: Any, log: ReadLog) -> Documents:
        """As `Labeller`."""
        if not isinstance(row, dict):
            return f"{kind_of(row)}, not an object", "one JSON object per line"
        log.num_rows += 1
        log.num_with_field += 1
        try:
            if self.read.format == PREFERENCE:
                made = labelled_pair(row, self.read, self.encoder)
            else:
                made = [self.encoder.labelled(example_of(row, self.read))]
        except RowError as error:
            # Roles and a template's messages may be as long as a row.
            other = f"   (or --data.train_on {error.train_on})" if error.train_on else ""
            return shorten(error.what), error.expected + other
        for each in made:
            log.saw_lost(each.lost or {})
        return made


def shorten(text: str) -> str:
    """The beginning of a text that is too long for an error."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def labeller_for(source: Source, tokenizer: Tokenizer) -> LabellerFor:
    """Chooses the labeller of a source's rows by their columns; a ConfigError if these are of several formats."""
    labels = source.labels

    def choose(names: Sequence[str]) -> RowLabeller | None:
        if format_of(names, source) == "text":
            return None
        read = columns_of(names, format=labels.format, fields=labels.fields)
        train_on = labels.train_on or _DEFAULT[read.format]
        if train_on not in (allowed := _ALLOWED[read.format]):
            raise ConfigError(
                f"data.train_on = {train_on!r} with rows of the format {read.format}",
                expected=f"one of {', '.join(allowed)}"
                if len(allowed) > 1
                else f"{allowed[0]}: the two answers",
                fix=f"--data.train_on {_DEFAULT[read.format]}",
            )
        template = chat_template(tokenizer, labels)
        if template is None and (read.format == "chat" or "instruction" in read.names):
            raise ConfigError(
                f"{source.name} has conversations, but the tokenizer {tokenizer.name!r} has no chat template",
                expected="a chat template, which says how a conversation becomes text",
                fix="--data.chat_template FILE   (jinja, as chat_template.jinja of a model on the Hub)",
            )
        encoder = encoder_of(tokenizer, labels, train_on, template)
        return RowLabeller(read, encoder, tokenizer.fingerprint)

    return choose


def format_of(names: Sequence[str], source: Source) -> str:
    """The format of rows with these columns; also `text` if `auto` recognises none: its errors name the field.

    Raises:
        ConfigError: the columns are of several formats, or not those of the requested one.
    """
    labels = source.labels
    formats = {*formats_in(names, fields=labels.fields)}
    if labels.format == "text" or (labels.format == "auto" and formats <= {"text"}):
        return "text"
    return columns_of(names, format=labels.format, fields=labels.fields).format


def template_source(tokenizer: Tokenizer, labels: Labels) -> str | None:
    """The text of the chat template of a tokenizer, or of the file that is named; None without any."""
    return (
        _own_template(tokenizer)[0]
        if labels.chat_template is None
        else template_file(labels.chat_template)
    )


def chat_template(
    tokenizer: Tokenizer, labels: Labels, source: str | None = None
) -> ChatTemplate | None:
    """A tokenizer's chat template, or that of the configured file, or `source` instead; None without any."""
    own, special = _own_template(tokenizer)
    if source is None:
        source = own if labels.chat_template is None else template_file(labels.chat_template)
    if source is None:
        return None
    _refuse_wrong(source, labels)
    template = ChatTemplate(source, special, labels.template_variables)
    if not template.prints_date:
        return template
    today = f"--data.template_variables '{{date: {datetime.now(UTC).date()}}}'"
    if template.today is None:
        raise ConfigError(
            "the chat template prints today's date, which will be different tomorrow",
            expected="one date for all rows, so that the same rows give the same tokens on any day",
            fix=today,
        )
    try:
        date.fromisoformat(template.today)
    except ValueError as error:
        raise ConfigError(
            f"data.template_variables has date: {template.today}: {error}",
            expected="a day: year, month, day",
            fix=today,
        ) from error
    return template


def template_file(name: str) -> str:
    """The chat template in a file; a DataError if it cannot be read."""
    try:
        return expanded(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template = {name!r} cannot be read: {error}",
            expected="a file with a chat template in jinja",
            fix="check the path",
        ) from error


def encoder_of(
    tokenizer: Tokenizer, labels: Labels, train_on: str, template: ChatTemplate | None
) -> Encoder:
    """The encoder of the examples of a source with these labels."""
    return Encoder(
        _backend(tokenizer),
        tokenizer.end_id,
        template,
        train_on,
        lost_texts=labels.lost_texts,
        control_ids=labels.control_tokens == "ids",
        bos_id=for_texts(tokenizer, labels).bos_id,
    )


def ends_turns(encoder: Encoder) -> bool:
    """Whether the trained part of an answer has an end, or that cannot be determined."""
    messages = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER})
    try:
        answered = replace(encoder, train_on="assistant").labelled(Example(messages))
    except RowError:
        return True
    written = str(
        encoder.backend.decode(
            answered.ids[answered.loss_mask].tolist(), skip_special_tokens=False
        )
    )
    return _ANSWER not in written or bool(written.rpartition(_ANSWER)[2].strip())


def _refuse_wrong(source: str, labels: Labels) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(source)
    except TemplateSyntaxError as error:
        name = labels.chat_template or "the tokenizer's chat template"
        raise DataError(
            f"{name}, line {error.lineno}: {error.message}",
            expected="a chat template in jinja",
            fix="correct the line",
        ) from error


def _own_template(tokenizer: Tokenizer) -> tuple[str | None, dict[str, str]]:
    """The tokenizer's own template and the special tokens that templates may name."""
    folder = getattr(tokenizer, "folder", None)
    if folder is None:
        return None, {"eos_token": "<|end|>"}
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template, {
        name: str(token)
        for name, token in loaded.special_tokens_map.items()
        if not isinstance(token, list)
    }


def _backend(tokenizer: Tokenizer) -> Any:
    from threefold.data.tokens import byte_backend

    backend = (
        byte_backend() if tokenizer.name == "bytes" else getattr(tokenizer, "backend", None)
    )
    if not hasattr(backend, "encode_batch_fast"):
        raise DataError(
            f"data.tokenizer = {tokenizer.name!r} is written in Python and does not report token offsets",
            expected="a tokenizer with a tokenizer.json, for rows with labels",
            fix="AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER), then --data.tokenizer FOLDER",
        )
    return backend
