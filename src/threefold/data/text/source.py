"""Documents from sources: what `data.source` names (`store/open_source.py`), as pieces that are read one by one.

A source has its `fingerprint` and its `pieces` before any document is decoded. A piece is an entire file, some lines of
a .jsonl, some row groups of a .parquet or some rows of a Hub dataset; pieces are in the documents' order and the same
on every machine, so that the work on them can be shared out, stopped and resumed. Problems with the documents are
collected in a `ReadLog`, so that one error names several lines.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from threefold.arrays import Bool, Int32
from threefold.config.yaml_text import pasted
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.listing import Known
from threefold.errors import DataError, Problem
from threefold.jsonl import Values

PREFERENCE = "preference"
"""The format of rows with two answers: their documents are pairs, each a chosen one and the rejected one after it."""
SIDES = ("chosen", "rejected")
TRAIN_ON = ("assistant", "last", "completion", "all")
_ENDS = {"trained": "", "missing": ", which has no end token"}

MAX_PROBLEMS = 10
_OF_A_KIND = 3
MAX_FIELDS = 40

_CHATS = {"messages", "conversations", "prompt", "completion", "instruction", "response"}
# Names of other columns that hold a question, and what is to be learnt as its answer.
_ASKED = ("instruction", "question", "query", "problem", "prompt", "user", "input", "source")
_ANSWERS = ("response", "answer", "output", "solution", "assistant", "target")
CHAT_FIX = (
    "leave data.format out: conversations are found by their columns; columns of other names: --data.fields "
    "'{prompt: NAME, completion: NAME}'   (or one field of text: --data.fields '{text: NAME}')"
)


@dataclass(frozen=True)
class LossMask:
    """Which tokens of a source's documents are trained on. Stores keep it as JSON; `str` of it is only for people.

    Attributes:
        format: of the rows: chat, prompt_completion, preference, or tokens (which came with their labels).
        columns: the columns that were read, by the source's own names.
        train_on: assistant, last, completion or all; `labels` of tokens.
        end: `trained`: so is the token that ends an answer; `missing`: the chat template writes none.
        templated: a chat template has rendered all rows; else some may have been texts.
    """

    format: str
    columns: tuple[str, ...]
    train_on: str
    end: str = "trained"
    templated: bool = False

    def __post_init__(self) -> None:
        if self.train_on not in (*TRAIN_ON, "labels") or self.end not in _ENDS:
            raise ValueError(f"train_on is {self.train_on!r} and end {self.end!r}")

    def __str__(self) -> str:
        return f"{self.format} ({', '.join(self.columns)}), trained on: {self.train_on}{_ENDS[self.end]}"

    @property
    def has_pairs(self) -> bool:
        """Whether documents are pairs, a chosen one and then the rejected one."""
        return self.format == PREFERENCE


def no_end_warning(template: str) -> str:
    """A warning about a loss mask without ends; `template`: the chat template's file, or the tokenizer that has it."""
    return (
        f"warning: the chat template of {template} writes no end token after the assistant's turn, so the model does "
        "not learn to stop. With a copy of it that writes one there: --data.chat_template FILE   (else end answers at "
        "the token that begins the next turn)"
    )


@dataclass(frozen=True)
class Labels:
    """How rows that are not text are read and which tokens are trained on, in terms of the config's `data` section."""

    format: str = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)
    train_on: str | None = None
    lost_texts: str = "refuse"
    chat_template: str | None = None
    template_variables: Values = field(default_factory=dict)
    control_tokens: str = "text"
    bos: bool | str = "auto"


@dataclass(frozen=True)
class Source:
    """The data to read, in terms of the config's `data` section.

    Args:
        name: `stdlib`, a file, folder or glob (`listing`), `hf:ID` (ID may be a folder), a folder of `save_to_disk`, or
            a token store: a prepared folder or the prefix of a .bin/.idx pair. Several of them, but stores: one after
            the other, each file once.
        split, config_name, revision: of a Hub dataset.
        skip_bad_lines: count lines, rows and files that cannot be read instead of refusing them.
        labels: what to train on in rows that are not text.
    """

    name: str | tuple[str, ...]
    split: str = "train"
    config_name: str | None = None
    revision: str | None = None
    skip_bad_lines: bool = False
    labels: Labels = field(default_factory=Labels)

    @property
    def text_field(self) -> str:
        """The field of the text in rows; `meta.text` is the field `text` inside `meta`."""
        return self.labels.fields.get("text", "text")


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes of a .jsonl, row groups of a .parquet, rows of a Hub dataset, or all of the file."""

    file: int
    start: int
    stop: int
    size_bytes: int


@dataclass
class ReadLog:
    """Counts of what was read, and the first problems; `skip_bad` only counts bad lines, rows and files.

    `lost`: the texts that chat templates did not write, by their kind.
    """

    skip_bad: bool = False
    num_rows: int = 0
    num_with_field: int = 0
    num_skipped: int = 0
    num_bad: int = 0
    problems: list[Problem] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    text_fields: list[str] = field(default_factory=list)

    def bad(self, what: str, *, expected: str, fix: str, count: int = 1) -> None:
        """One line, row or file that cannot be used, or `count` rows that only fail together."""
        if self.skip_bad:
            self.num_skipped += count
            return
        self.num_bad += 1
        self._keep(Problem(what, expected, fix))

    def _keep(self, problem: Problem) -> None:
        """Keeps a problem, of each kind only the first."""
        of_its_kind = sum(each.expected == problem.expected for each in self.problems)
        if of_its_kind < _OF_A_KIND and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def saw_row(self, row: Values) -> None:
        """Remembers a row's fields, the longest text first, for the error if no row has the wanted one."""
        if len(self.fields) < MAX_FIELDS:
            texts = {
                name: len(text)
                for name in names_in(row)
                if isinstance(text := value_of(row, name), str)
            }
            self._remember(names_in(row), sorted(texts, key=lambda name: -texts[name]))

    def saw_lost(self, lost: Mapping[str, int]) -> None:
        """Counts texts that a chat template does not write."""
        for kind, count in lost.items():
            self.lost[kind] = self.lost.get(kind, 0) + count

    def _remember(self, fields: Sequence[str], text_fields: Sequence[str]) -> None:
        self.fields.extend(name for name in fields if name not in self.fields)
        self.text_fields.extend(name for name in text_fields if name not in self.text_fields)

    def merge(self, other: "ReadLog") -> None:
        """Adds the log of later pieces."""
        for count in ("num_rows", "num_with_field", "num_skipped", "num_bad"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        self.saw_lost(other.lost)
        for problem in other.problems:
            self._keep(problem)
        self._remember(other.fields, other.text_fields)


MISSING = object()


def value_of(row: Values, name: str) -> Any:
    """The value of a field, or of `inner.field`; a field with exactly this name comes first. MISSING without one."""
    if name in row or "." not in name:
        return row.get(name, MISSING)
    inner: Any = row
    for part in name.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return MISSING
        inner = inner[part]
    return inner


def names_in(row: Values) -> list[str]:
    """The names of a row's fields, with `inner.field` for those inside another."""
    return [
        name
        for key, value in row.items()
        for name in (
            [f"{key}.{inner}" for inner in names_in(value)]
            if isinstance(value, Mapping) and value
            else [key]
        )
    ]


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if isinstance(value, Mapping):
        return "an object"
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        str: "text",
    }
    return kinds.get(type(value), type(value).__name__)


class KnownText(NamedTuple):
    """A text of a row: its message (None: of no message), whose it is, its key there, and what has become of it.

    `reason`: why it is lost; None: it is in the rendering.
    """

    message: int | None
    role: str
    kind: str
    text: str
    reason: str | None = None


class Labelled(NamedTuple):
    """A document as token ids, [n] int32, and whether each of them is trained on, [n] bool.

    `lost`: how many texts of its row the chat template does not write, of each kind; None: there is no template.
    `texts`: all texts of its messages.
    """

    ids: Int32
    loss_mask: Bool
    lost: Mapping[str, int] | None = None
    texts: Sequence[KnownText] = ()


Document = str | Labelled
Documents = Sequence[Document] | tuple[str, str]


class Labeller(Protocol):
    """Makes documents of rows. Pickles."""

    @property
    def loss_mask(self) -> LossMask | None:
        """The loss mask; None: the documents are texts, and all of their tokens are trained on."""

    @property
    def recipe(self) -> str:
        """Equal for equal documents of equal rows."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns that are read."""

    def documents(self, row: Any, log: ReadLog) -> Documents:
        """The documents of a row, as a list, or (problem, what was expected)."""


LabellerFor = Callable[[Sequence[str]], Labeller | None]
"""The labeller for rows with these columns; None: they are texts."""


@dataclass(frozen=True)
class Opening:
    """A source, and how to open it.

    Attributes:
        labeller_for: for rows that are not text.
        memory: folder where the files' digests are remembered.
        known: files that other entries of a list already read; the new ones are added.
    """

    source: Source
    labeller_for: LabellerFor | None = None
    memory: Path | None = None
    known: Known = field(default_factory=dict)


class TextSource(Protocol):
    """Documents in a fixed order. Pickles, so that other processes can read pieces."""

    @property
    def loss_mask(self) -> LossMask | None:
        """The loss mask of the documents, which are `Labelled` then; None: they are texts."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Identity of the content and of the way it is read; needs no decoding."""

    @property
    def text_field(self) -> str | None:
        """Field that holds the text; None if each file is one document."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
    def refuse_changed(self, pieces: Sequence[Piece]) -> None:
        """DataError if a file of some pieces has changed since the fingerprint was made."""

    def read(self, piece: Piece, log: ReadLog) -> Iterator[Document]:
        """The documents of one piece; problems with them go to `log`."""


def log_error(source: TextSource, log: ReadLog) -> DataError:
    """One error for the problems of a log; a field that no row has hides the rows that lack it."""
    if source.text_field is not None and log.num_rows and not log.num_with_field:
        return missing_field(
            source.name,
            source.text_field,
            log.fields,
            texts=log.text_fields,
            num_rows=log.num_rows,
        )
    problems = list(log.problems)
    if more := log.num_bad - len(problems):
        last = problems[-1]
        problems[-1] = Problem(
            f"{last.what}\n  (and {more:,} more like these)", last.expected, last.fix
        )
    return cast("DataError", DataError.of(problems))


def missing_field(
    where: str,
    field: str,
    fields: Sequence[str],
    *,
    texts: Sequence[str],
    num_rows: int | None = None,
) -> DataError:
    """The error for a text field that no row has: names the existing fields, and as the fix one of `texts`."""
    rows = (
        f"none of the first {num_rows:,} rows has this field"
        if num_rows is not None
        else "no such field"
    )
    fix = "a source whose rows have a field of text"
    asked, answer, more, system = (
        next((text for name in names for text in texts if text.lower() == name), None)
        for names in (_ASKED, _ANSWERS, ("context",), ("system", "system_prompt"))
    )
    if field == "text" and asked and answer:
        columns = {"prompt": asked, "completion": answer}
        if more or system:
            parts = {"instruction": asked, "input": more, "system": system, "output": answer}
            columns = {ours: theirs for ours, theirs in parts.items() if theirs}
        fix = f"--data.fields {pasted(columns)}   (only the {answer} is trained on)"
    elif nearest := difflib.get_close_matches(
        field, [name for name in texts if name not in _CHATS], 1, 0.5
    ):
        fix = f"--data.fields {pasted({'text': nearest[0]})}"
    elif "conversation" in fields:
        fix = f"--data.fields {pasted({'messages': 'conversation'})}"
    elif _CHATS & {name.partition(".")[0] for name in fields}:
        fix = CHAT_FIX
    elif texts:
        others = (
            f"   (or another field of text: {', '.join(texts[1:])})" if len(texts) > 1 else ""
        )
        fix = f"--data.fields {pasted({'text': texts[0]})}{others}"
    return DataError(
        f"data.fields.text = {field!r}: {where}: {rows}",
        expected=f"one of the existing fields: {', '.join(fields) or 'none'}",
        fix=fix,
    )


def chat_or(field: str, fix: str) -> str:
    """The fix for a field that is not text: another one if it is known to hold a conversation."""
    return CHAT_FIX if field in _CHATS else fix


# A piece's file is counted within its source, whose number is in the bits above these.
_FILE_BITS = 32


@dataclass(frozen=True)
class ConcatSource:
    """A list in `data.source`: the documents of `sources`, one source after the other."""

    sources: tuple[TextSource, ...]

    @property
    def name(self) -> str:
        return f"[{', '.join(source.name for source in self.sources)}]"

    @property
    def text_field(self) -> str | None:
        return next(
            (source.text_field for source in self.sources if source.text_field is not None),
            None,
        )

    @property
    def loss_mask(self) -> LossMask | None:
        return self.sources[0].loss_mask

    @cached_property
    def fingerprint(self) -> str:
        return content_digest(f"joined 1 {[source.fingerprint for source in self.sources]}")

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        return [
            replace(piece, file=number << _FILE_BITS | piece.file)
            for number, source in enumerate(self.sources)
            for piece in source.pieces
        ]

    def refuse_changed(self, pieces: Sequence[Piece]) -> None:
        for source in self.sources:
            source.refuse_changed(
                [own for each, own in map(self._own, pieces) if each is source]
            )

    def read(self, piece: Piece, log: ReadLog) -> Iterator[Document]:
        source, own = self._own(piece)
        return source.read(own, log)

    def _own(self, piece: Piece) -> tuple[TextSource, Piece]:
        """The source of a piece, and the piece as that source counts its files."""
        return self.sources[piece.file >> _FILE_BITS], replace(
            piece, file=piece.file & (1 << _FILE_BITS) - 1
        )
