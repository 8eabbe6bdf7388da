"""Which tokens of a conversation the assistant wrote: by brute force, with none of the code that it checks.

Every character of every text is replaced by a private one of its own, the conversation is rendered, and where each
comes out is seen. A turn begins after the family's header (what its generation prompt ends with), and ends with its end
token. Families are told in a table by hand; `check` holds the table against the rendering of single turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

TODAY = {"%d %b %Y": "26 Jul 2024", "%Y-%m-%d": "2024-07-26", "%d %B %Y": "26 July 2024"}
_FIRST = 0xF0000
# What is not replaced: what JSON escapes; thinking, which templates look for; white space, which they trim.
_KEPT = [
    re.compile(each)
    for each in (r"</?think>|[\"\\]", r"</?think>|[\s\"\\]", r"[\"\\]", r"[\s\"\\]")
]


class CannotTellError(Exception):
    """The oracle cannot see what the template does with this conversation."""


@dataclass(frozen=True)
class Family:
    """One chat template as a person knows it.

    Attributes:
        header: what stands before the assistant writes, in whatever forms; where it has thinking in it, without too.
        ends: the end token of a turn, in whatever forms; none: there is none.
        closing: of a family without an end token: what else of the turn may follow its text.
        system, tools, twice: takes system messages; tools and their results; a turn of the assistant after another.
    """

    name: str
    source: str
    special: dict[str, str]
    header: Sequence[str]
    ends: Sequence[str]
    tokenizer: str = "all"
    closing: str = ""
    system: bool = True
    tools: bool = False
    twice: bool = True

    @property
    def dated(self) -> str:
        """The template with its dates written out by a search for them."""
        return re.sub(
            r"strftime_now\('(.*?)'\)", lambda found: repr(TODAY[found[1]]), self.source
        )

    def render(self, messages: Any, tools: Any = None, prompt: bool = False) -> str:
        texts, _ = render_jinja_template(
            [messages],
            tools=list(tools) if tools else None,
            chat_template=self.dated,
            add_generation_prompt=prompt,
            **self.special,
        )
        return texts[0]


@dataclass(frozen=True)
class Seen:
    """A rendered text, with the texts in it as private characters; and turns as (begin, end, end of the end token)."""

    text: str
    hidden: str
    turns: list[tuple[int, int, int]]


def check(family: Family) -> None:
    """Holds the table against the template's rendering of single turns."""
    user, answer = {"role": "user", "content": "qqq"}, {"role": "assistant", "content": "aaa"}
    prompt = family.render([user], prompt=True)
    assert prompt.endswith(tuple(family.header)), prompt[-60:]
    whole = family.render([user, answer])
    header, closing = re.fullmatch(r"(.*qqq.*)aaa(.*)", whole, re.S).groups()  # type: ignore[union-attr]
    assert any(each in header[header.index("qqq") :] for each in family.header), header
    assert not family.ends or any(each in closing for each in family.ends), closing


def seen(family: Family, messages: Sequence[Any], tools: Any = None) -> Seen:
    """The rendered text and its turns of the assistant."""
    plain = family.render(messages, tools)
    covers = []
    for kept, empty in (*((each, True) for each in _KEPT), (_KEPT[1], False)):
        cover = _Cover(kept, empty)
        raw = family.render(
            [cover.message(number, each) for number, each in enumerate(messages)], tools
        )
        if "".join(cover.meant.get(letter, letter) for letter in raw) == plain:
            shown = {cover.owner[letter] for letter in raw if letter in cover.owner}
            covers.append(
                (
                    cover,
                    raw,
                    shown.issuperset(
                        n for n, m in enumerate(messages) if m["role"] == "assistant"
                    ),
                )
            )
    if not covers:
        raise CannotTellError(f"{family.name}: {plain!r}")
    cover, raw, _ = next((each for each in covers if each[2]), covers[0])
    hidden = "".join(letter for letter in raw if cover.meant.get(letter, "x"))
    places: dict[int, list[int]] = {}
    at = 0
    for letter in raw:
        if letter in cover.owner:
            places.setdefault(cover.owner[letter], []).append(at)
        at += cover.meant.get(letter, "x") != ""
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            floor = max((turn[2] for turn in turns), default=0)
            if number not in places:
                # A text of which nothing is seen: the turn is at the next header.
                begins = [
                    (hidden.find(each, floor), -len(each))
                    for each in family.header
                    if each in hidden[floor:]
                ]
                if not begins:
                    raise CannotTellError(
                        f"{family.name}: nothing of messages[{number}] is written"
                    )
                places[number] = [min(begins)[0] - min(begins)[1]]
                cover.empty.add(number)
            first = places[number][0]
            for other, each in places.items():
                width = other not in cover.empty
                floor = max(
                    [
                        floor,
                        *(at + width for at in each if other != number and at + width <= first),
                    ]
                )
            after = places[number][-1] + (number not in cover.empty)
            turns.append(_turn(family, hidden, floor, first, after))
    return Seen(plain, hidden, turns)


def _turn(
    family: Family, hidden: str, floor: int, first: int, after: int
) -> tuple[int, int, int]:
    begins = [
        hidden.rfind(each, floor, first) + len(each)
        for each in family.header
        if each in hidden[floor:first]
    ]
    # Without a header, the turn follows another without anything that asks for it: it is its text.
    begin = max(begins, default=first)
    if family.ends:
        found = [
            (hidden.find(each, after), each) for each in family.ends if each in hidden[after:]
        ]
        if not found:
            raise CannotTellError(f"{family.name}: no end after {hidden[after:]!r}")
        end, token = min(found)
        if any(letter >= chr(_FIRST) for letter in hidden[after:end]):
            raise CannotTellError(
                f"{family.name}: another text before the end of {hidden[first:]!r}"
            )
        return begin, end, end + len(token)
    closed = re.compile(family.closing).match(hidden, after)
    end = after + len(closed[0]) if closed else after
    return begin, end, end


class _Cover:
    """Private characters for those of messages. An empty text is one character that means nothing."""

    def __init__(self, kept: re.Pattern[str], empty: bool) -> None:
        self.kept = kept
        self.covers_empty = empty
        self.owner: dict[str, int] = {}
        self.meant: dict[str, str] = {}
        self.known: dict[tuple[int, str], str] = {}
        self.empty: set[int] = set()

    def message(self, number: int, message: Any) -> Any:
        covered = {**message}
        if message["role"] == "assistant" and "content" in message and not message["content"]:
            if self.covers_empty and not message.get("tool_calls"):
                self.empty.add(number)
                covered["content"] = self._letter(number, "", "content")
        elif message.get("content"):
            # Templates look for messages that are equal to others: those stay equal.
            where = "content" if message["role"] == "assistant" else f"of {message['content']}"
            covered["content"] = self._text(number, message["content"], where)
        if message.get("reasoning_content"):
            covered["reasoning_content"] = self._text(
                number, message["reasoning_content"], "reasoning"
            )
        if message.get("tool_calls"):
            covered["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": self._arguments(number, place, call),
                    },
                }
                for place, call in enumerate(message["tool_calls"])
            ]
        return covered

    def _arguments(self, number: int, place: int, call: Any) -> Any:
        given = call["function"]["arguments"]
        return {key: self._text(number, each, f"{place} {key}") for key, each in given.items()}

    def _text(self, number: int, text: str, where: str) -> str:
        pieces, at = [], 0
        for kept in self.kept.finditer(text):
            pieces += [
                self._letter(number, letter, f"{where} {place}")
                for place, letter in _from(text, at, kept.start())
            ]
            pieces.append(kept[0])
            at = kept.end()
        return "".join(
            [
                *pieces,
                *(
                    self._letter(number, letter, f"{where} {place}")
                    for place, letter in _from(text, at, len(text))
                ),
            ]
        )

    def _letter(self, number: int, letter: str, where: str) -> str:
        key = (-1 if where.startswith("of ") else number, where)
        private = self.known.setdefault(key, chr(_FIRST + len(self.known)))
        self.owner.setdefault(private, number)
        self.meant[private] = letter
        return private


def _from(text: str, begin: int, end: int) -> list[tuple[int, str]]:
    return [(place, text[place]) for place in range(begin, end)]


@dataclass(frozen=True)
class Tokens:
    """A tokenizer and its twin that knows no control tokens; `prefix`: a space is put before every piece of text."""

    whole: Tokenizer
    twin: Tokenizer
    controls: dict[str, int]
    bytes_of: dict[int, bytes]
    prefix: bool = False


def expected(
    family: Family, tokens: Tokens, said: Seen, train_on: str, prompt: str = ""
) -> tuple[list[int], list[bool]]:
    """Ids and targets: a token is learnt iff all its characters are.

    `prompt`: of a completion, the rendered prompt: all that follows is learnt.
    """
    learnt = [train_on == "all"] * len(said.text)
    turns = said.turns[-1:] if train_on == "last" else said.turns
    if train_on == "assistant" or train_on == "last":
        for begin, _, after in turns:
            learnt[begin:after] = [True] * (after - begin)
    elif train_on == "completion":
        learnt[len(prompt) :] = [True] * (len(said.text) - len(prompt))
    names = sorted(tokens.controls, key=len, reverse=True)
    ids: list[int] = []
    targets: list[bool] = []
    at = 0
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", said.hidden):
        if not piece:
            continue
        if piece in tokens.controls:
            ids.append(tokens.controls[piece])
            targets.append(all(learnt[at : at + len(piece)]))
        else:
            text = said.text[at : at + len(piece)]
            found = tokens.twin.encode(text, add_special_tokens=False).ids
            ids += found
            targets += _learnt(tokens, found, text, learnt[at : at + len(piece)])
        at += len(piece)
    return ids, targets


def _learnt(tokens: Tokens, ids: list[int], text: str, learnt: list[bool]) -> list[bool]:
    """Of each token, whether all its bytes are learnt: tokens are laid one after another along the bytes."""
    flags = [flag for letter, flag in zip(text, learnt, strict=True) for _ in letter.encode()]
    written = b"".join(tokens.bytes_of[id] for id in ids)
    if tokens.prefix:
        flags = [flags[0], *flags]
    assert written == (b" " if tokens.prefix else b"") + text.encode(), (written, text)
    found, at = [], 0
    for id in ids:
        length = len(tokens.bytes_of[id])
        space = length - len(written[at : at + length].lstrip())
        # The first word of a turn is learnt with the template's space before it, if they are one token.
        words = flags[at + space : at + length]
        found.append(all(flags[at : at + length]) or (any(words) and all(words)))
        at += length
    return found
