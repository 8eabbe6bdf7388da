"""Which texts of a conversation are written by its chat template, and where.

Each text is replaced by a unique word, and the conversation is rendered once more: where the word appears, the
template writes the text. That works for any template, and needs no list of families. If the rendering is otherwise the
same, each place is known to the character. If it is not, the template depends on the contents: then the words of a
text must be in the rendering, in their order.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from threefold.data.chat.formats import Message, Messages, RowError, in_common

REASONING = ("reasoning_content", "reasoning", "thinking")
EARLIER = "reasoning of earlier turns"
# Parts of messages besides texts that templates may read.
_NAMES = ("role", "name", "id", "tool_call_id")
# In the content of an answer: reasoning in tags, which many templates cut off.
_THOUGHTS = "<think>"
_TAGS = re.compile(r"(\s*</?think>\s*)")
# The texts among the values of arguments that are JSON already.
_VALUES = re.compile(r'(?<=[:\[,])(\s*")((?:[^"\\]|\\.)+)(?=")')
_WORD = re.compile("Aq([g-v]{4})x")
# Switches that templates read, and do not write: /think, /no_think.
_SWITCHES = re.compile(r"(?<!\S)/\w+")
_LONGEST = 40


class RowText(NamedTuple):
    """A text of a message, without the white space around it, and the key that has it."""

    message: int
    key: str
    text: str


class Written(NamedTuple):
    """A place of a text, by its number: [begin, end) of the rendering, and where its word begins in that of words."""

    number: int
    begin: int
    end: int
    word: int


@dataclass(frozen=True)
class RowTexts:
    """The texts of a conversation.

    Args:
        text: its rendering.
        render: renders other messages as these were, with `prompt` up to where the assistant would begin to write.
    """

    messages: Messages
    text: str
    render: Callable[..., str]

    @property
    def texts(self) -> list[RowText]:
        return self._worded[1]

    @cached_property
    def places(self) -> list[Written] | None:
        """Every place where a text is written; None: the template renders other texts in another way."""
        places, at, done = [], 0, 0
        for match in _WORD.finditer(self._shown):
            literal, number = self._shown[done : match.start()], _number(match[1])
            if number >= len(self.texts) or not self.text.startswith(literal, at):
                return None
            at, done, core = at + len(literal), match.end(), self.texts[number].text
            forms = (core, json.dumps(core, ensure_ascii=False)[1:-1])
            form = next((form for form in forms if self.text.startswith(form, at)), None)
            if form is None:
                return None
            places.append(Written(number, at, at + len(form), match.start()))
            at += len(form)
        return places if self._shown[done:] == self.text[at:] else None

    @cached_property
    def lost(self) -> dict[int, str]:
        """The texts, by number, that are not in the rendering, and what each is, for people."""
        lost = {}
        for number, text in enumerate(self.texts):
            if not self._is_written(number):
                lost[number] = self._kind(number, text)
        return lost

    def refuse(self, lost: Mapping[int, str]) -> None:
        """RowError for the first of the lost texts, but for reasoning of earlier turns, and for unknown keys."""
        for number, kind in lost.items():
            if kind != EARLIER and not kind.startswith(_UNKNOWN):
                message, key, text = self.texts[number]
                system = self.messages[message]["role"] == "system"
                first = "the text at the beginning of the first question, or " if system else ""
                name = "its words beside the calls" if kind == _BESIDE else f"its {key}"
                raise RowError(
                    f"messages[{message}] ({self.messages[message]['role']}): the chat template does not write {name}: "
                    f"{text[:_LONGEST]!r}",
                    f"{first}a chat template that writes it: data.chat_template   (or --data.lost_texts count, to "
                    "train without it)",
                )

    def begin_of(self, place: Written) -> int:
        """Where the model would begin to write the turn that begins with this text."""
        shown, (message, _, _) = self._shown, self.texts[place.number]
        try:
            prompt = self.render(self._worded[0][:message], prompt=True)
        except RowError:
            return place.begin
        alike = in_common(prompt, shown)
        before = max((match.end() for match in _WORD.finditer(shown, 0, place.word)), default=0)
        return (
            place.begin - (place.word - alike) if before <= alike <= place.word else place.begin
        )

    @cached_property
    def _worded(self) -> tuple[list[Message], list[RowText]]:
        return _with_words(self.messages)

    @cached_property
    def _shown(self) -> str:
        """The rendering of the words; "" if the template does not take them."""
        try:
            return self.render(self._worded[0])
        except RowError:
            return ""

    def _is_written(self, number: int) -> bool:
        word = _word(number)
        if self.places is not None:
            return word in self._shown
        return (word in self._shown or self._comes_out(number)) and self._has_words(
            self.texts[number].text
        )

    def _comes_out(self, number: int) -> bool:
        """Whether the word of one text is in the rendering, with all other texts as they are."""
        try:
            return _word(number) in self.render(_with_words(self.messages, number)[0])
        except RowError:  # it takes no other text there: it reads this one
            return True

    def _has_words(self, text: str) -> bool:
        at = 0
        for word in re.findall(r"\w+", _SWITCHES.sub("", text)):
            if (at := self.text.find(word, at)) < 0:
                return False
            at += len(word)
        return True

    def _kind(self, number: int, text: RowText) -> str:
        message = self.messages[text.message]
        if text.key not in ("content", "tool_calls", *REASONING, _THOUGHTS):
            return f"{_UNKNOWN}{text.key!r}"
        if text.key in (*REASONING, _THOUGHTS):
            return EARLIER if self._is_written_at_the_end(number) else "reasoning"
        if message["role"] != "assistant":
            return f"texts of the {message['role']}"
        if text.key == "tool_calls":
            return "arguments of calls"
        return _BESIDE if message.get("tool_calls") else "answers"

    def _is_written_at_the_end(self, number: int) -> bool:
        """Whether the template writes a text if its turn is the last: it leaves it out of earlier turns on purpose."""
        last = self.texts[number].message + 1
        try:
            return last < len(self.messages) and _word(number) in self.render(
                self._worded[0][:last]
            )
        except RowError:
            return False


_BESIDE = "words beside calls"
_UNKNOWN = "texts of the unknown key "


def _word(number: int) -> str:
    return f"Aq{''.join(chr(ord('g') + int(digit, 16)) for digit in f'{number:04x}')}x"


def _number(letters: str) -> int:
    return int("".join(f"{ord(letter) - ord('g'):x}" for letter in letters), 16)


def _with_words(
    messages: Messages, only: int | None = None
) -> tuple[list[Message], list[RowText]]:
    """The messages with a word in place of each text, or of `only` one; and the texts."""
    words = _Words([], only)
    return [
        words.message(number, message) for number, message in enumerate(messages)
    ], words.texts


@dataclass(frozen=True)
class _Words:
    """Puts words in the place of texts, which are counted as they come."""

    texts: list[RowText]
    only: int | None

    def message(self, number: int, message: Message) -> Message:
        made = dict(message)
        for key, value in message.items():
            if key == "content" and message["role"] == "assistant":
                made[key] = self._answer(value, number)
            elif key == "content" or (isinstance(value, str) and key not in _NAMES):
                made[key] = self._words(value, number, key)
            elif key == "tool_calls" and isinstance(value, list):
                made[key] = [self._call(each, number) for each in value]
        return made

    def _words(self, value: Any, message: int, key: str) -> Any:
        if isinstance(value, str) and (core := value.strip()):
            # One reasoning, which a message may have under several keys.
            same = (
                [RowText(message, other, core) for other in REASONING]
                if key in REASONING
                else []
            )
            number = next(
                (at for at, text in enumerate(self.texts) if text in same), len(self.texts)
            )
            if number == len(self.texts):
                self.texts.append(RowText(message, key, core))
            return (
                value.replace(core, _word(number), 1) if self.only in (None, number) else value
            )
        if isinstance(value, Mapping):
            return {name: self._words(each, message, key) for name, each in value.items()}
        return (
            [self._words(each, message, key) for each in value]
            if isinstance(value, list | tuple)
            else value
        )

    def _answer(self, value: Any, message: int) -> Any:
        if not isinstance(value, str):
            return value
        parts = _TAGS.split(value)
        for at in range(0, len(parts), 2):
            thought = "</think>" in "".join(parts[at + 1 : at + 2])
            parts[at] = self._words(parts[at], message, _THOUGHTS if thought else "content")
        return "".join(parts)

    def _call(self, value: Any, message: int) -> Any:
        if not isinstance(value, Mapping):
            return value
        if isinstance(value.get("function"), Mapping):
            return {**value, "function": self._call(value["function"], message)}
        arguments = value.get("arguments")
        if isinstance(arguments, str):  # as JSON
            made = _VALUES.sub(
                lambda match: match[1] + self._words(match[2], message, "tool_calls"), arguments
            )
            return {**value, "arguments": made}
        return (
            {**value, "arguments": self._words(arguments, message, "tool_calls")}
            if arguments
            else value
        )
