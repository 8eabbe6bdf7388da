"""The character spans of the assistant's turns in a rendered conversation.

Each runs from where the model would begin to write (the rendering of the messages before, with the generation prompt)
to the end of its text. The messages up to the turn are rendered, and must be a prefix of the whole; or at least what
follows the message before must be. If a template renders earlier turns differently (thinking left out,
tools put before the last question), other texts are written into the turn, and what changes is the turn. An ambiguous
span is refused, and so is a turn with somebody else's text inside it.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threefold.data.chat.formats import Message, Messages, RowError, in_common
from threefold.data.chat.row_texts import REASONING, RowTexts

# Two texts that begin and end differently, and that no template takes for anything but words.
_PROBES = ("Aqx", "Bqz")
EVERYWHERE = 1 << 62
_NOWHERE = "\ufdd2"  # a character that is in no text
_OPEN = re.compile(r"(<[^<>]*|\[[^\[\]]*)$")
_WORDS = re.compile(r"\w+|[^\w\s]+")


class Turn(NamedTuple):
    """A span of the rendered text that the assistant wrote: [begin, end), in characters.

    Attributes:
        ending: what the template writes after the span if this turn is the last (`<|im_end|>` and a newline);
            "" if the span contains its end.
        reach: up to where the text continues like `ending`.
        shared: up to where the text would be the same if the conversation continued; what follows ends it.
        written: where the turn's content ends, if that matters to what ends it; else 0.
        next: up to where the text would be the same whatever came next, if that matters; the next part begins there.
    """

    begin: int
    end: int
    message: int
    ending: str = ""
    reach: int = 0
    shared: int = EVERYWHERE
    written: int = 0
    next: int = EVERYWHERE


@dataclass(frozen=True)
class Whole:
    """A rendered conversation whose turns are to be located.

    Args:
        render: renders other messages like these, with `prompt` up to where the assistant would begin to write.
        after_mark: renders them and returns what follows the last span that the template marks.
    """

    messages: list[Message]
    text: str
    render: Callable[..., str]
    after_mark: Callable[[Messages], str]

    def turn(self, number: int) -> Turn:
        """The span of one turn; RowError if it cannot be determined."""
        last = number + 1 == len(self.messages)
        before = (
            self.render(self.messages[:number], prompt=True)
            if number
            else self._prompt_of_nothing()
        )
        until = self.text if last else self.render(self.messages[: number + 1])
        if self.text.startswith(until) and until.startswith(before):
            return self.closed(Turn(len(before), len(until), number))
        return self._beside(number) or self._found(number, before)

    def all_marked(
        self, stretches: Sequence[tuple[int, int]], texts: RowTexts
    ) -> tuple[Turn, ...]:
        """The spans that the template marks as the assistant's; a turn may have several of them.

        Raises:
            RowError: a stretch belongs to no turn, or to several, or has another's text in it.
        """
        turns = [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant"
        ]
        filled = [(begin, end) for begin, end in stretches if end > begin]
        one_each = next((each for each in (stretches, filled) if len(each) == len(turns)), None)
        numbers = (
            turns
            if one_each is not None
            else [self._owner(stretch, texts) for stretch in filled]
        )
        owners = [number for number in numbers if number is not None]
        if len(owners) < len(numbers):
            raise RowError(
                f"the template marks {len(filled)} spans as generated, but there are {len(turns)} assistant turns",
                "spans that each lie within one turn of the assistant",
            )
        made = []
        for at, (number, stretch) in enumerate(zip(owners, one_each or filled, strict=True)):
            # What follows a span is the turn's end only if no other span of the turn follows.
            last = number not in owners[at + 1 :]
            made.append(self.marked(number, *stretch) if last else Turn(*stretch, number))
        if texts.places is None:
            self.refuse_others(made)
        for turn in made:
            self.refuse_within(turn, texts)
        return tuple(made)

    def _owner(self, stretch: tuple[int, int], texts: RowTexts) -> int | None:
        """The turn of a marked span: that of the texts in it, else of the text beside it; None without one."""
        begin, end = stretch
        places = [
            (place.begin, texts.texts[place.number].message) for place in texts.places or ()
        ]
        within = {message for place, message in places if begin <= place < end}
        if not within and places:
            before = max((each for each in places if each[0] < begin), default=(0, -1))[1]
            by_other = before < 0 or self.messages[before]["role"] != "assistant"
            within = {before + 1 if by_other else before}
        owner = within.pop() if len(within) == 1 else -1
        ours = 0 <= owner < len(self.messages) and self.messages[owner]["role"] == "assistant"
        return owner if ours else None

    def marked(self, number: int, begin: int, end: int) -> Turn:
        """The span of a turn that the template marks."""
        if number + 1 == len(self.messages):
            return self._ended(Turn(begin, end, number), self.text[end:])
        turns = [*self.messages[:number], {"role": "assistant", "content": _PROBES[0]}]
        try:
            return self._ended(Turn(begin, end, number), self.after_mark(turns))
        except RowError:
            return Turn(begin, end, number)

    def checked(self, turns: Sequence[Turn], texts: RowTexts) -> tuple[Turn, ...]:
        """The turns, which must contain everything that the assistant wrote, and nothing else.

        A turn begins before the first of its texts: its reasoning is the model's own even if the model would be
        asked not to reason.

        Raises:
            RowError: a turn contains another message's text, or lacks a text of its own.
        """
        if texts.places is None:
            self.refuse_others(turns)
            return tuple(turns)
        whole = {turn.message: turn for turn in turns}
        for place in texts.places:
            message, key, _ = texts.texts[place.number]
            turn = whole.get(message)
            if turn is not None and place.begin < turn.begin:
                whole[message] = turn._replace(begin=texts.begin_of(place))
            elif turn is not None and place.end > max(turn.end, turn.reach):
                raise RowError(
                    f"messages[{message}]: the chat template writes its {key} outside of its turn",
                    "a template that writes a turn in one piece, or marks it: {% generation %}",
                )
        for turn in whole.values():
            self.refuse_within(turn, texts)
        return tuple(whole.values())

    def refuse_within(self, turn: Turn, texts: RowTexts) -> None:
        """RowError if another message's text is inside a turn, by the places of the texts."""
        for place in texts.places or ():
            message = texts.texts[place.number].message
            if (
                self.messages[message]["role"] != "assistant"
                and place.begin < turn.end
                and turn.begin < place.end
            ):
                raise self._within(message, turn)

    def refuse_others(self, turns: Sequence[Turn]) -> None:
        """RowError if a text not by the assistant is inside one of the turns, by its words."""
        for number, message in enumerate(self.messages):
            words = (
                _WORDS.findall(message.get("content") or "")
                if message["role"] != "assistant"
                else []
            )
            for turn in turns if words else ():
                stretch = self.text[turn.begin : turn.end]
                # Only where it can be is it looked for, which takes two renderings.
                if all(word in stretch for word in words) and self._lies_in(number, turn):
                    raise self._within(number, turn)

    def _within(self, number: int, turn: Turn) -> RowError:
        return RowError(
            f"messages[{number}]: the chat template writes it inside messages[{turn.message}], a turn of the "
            f"assistant, so text of the {self.messages[number]['role']} would be trained on",
            "a template that writes it beside the turn, or marks what the assistant wrote with {% generation %}",
        )

    def _lies_in(self, number: int, turn: Turn) -> bool:
        try:
            begin, end = self._content(self.messages, number)
        except RowError:  # it is not written once and as it is
            return False
        return begin < turn.end and turn.begin < end

    def _ended(self, turn: Turn, ending: str) -> Turn:
        reach = turn.end + in_common(self.text[turn.end :], ending)
        return self.closed(turn._replace(ending=ending, reach=reach))

    def closed(self, turn: Turn) -> Turn:
        """The turn, with the fields that distinguish its end from that of the conversation."""
        if turn.message + 1 < len(self.messages):
            content = (self.messages[turn.message].get("content") or "").rstrip()
            if turn.ending.strip() and turn.reach < turn.end + len(turn.ending.rstrip()):
                return turn._replace(next=self._next_prompt(turn))
            if (
                content
                and not turn.ending
                and self.text[turn.begin : turn.end].rstrip().endswith(content)
            ):
                return turn._replace(next=self._next_message(turn.message + 1))
            return turn
        try:
            shared = in_common(
                self.text,
                self.render([*self.messages, {"role": "user", "content": _PROBES[0]}]),
            )
            if shared == len(self.text):
                return turn
            return turn._replace(
                shared=shared, written=self._content(self.messages, turn.message)[1]
            )
        except RowError:
            return turn

    def _next_prompt(self, turn: Turn) -> int:
        """Up to where the text would be the same if the assistant began to write after a turn; at least its end."""
        turns = self.messages[: turn.message + 1]
        with contextlib.suppress(RowError):
            alike = in_common(self.text, self.render(turns, prompt=True))
            # After a question: an answer would have its own end there.
            question: list[Message] = [{"role": "user", "content": _PROBES[0]}]
            before, prompt = self.render(question), self.render(question, prompt=True)
            # From the first difference, or from the token that contains it.
            header = prompt[len(_OPEN.sub("", prompt[: in_common(before, prompt)])) :].strip()
            # A common part of headers, such as <|im_start|>, does not end a turn.
            if not header.startswith(self.text[turn.end : alike].strip()):
                return alike
        return turn.end

    def _next_message(self, number: int) -> int:
        """Up to where the text does not depend on the role of a message; nowhere if that cannot be known."""
        alike = EVERYWHERE
        for role in {"system", "user", "tool"} - {self.messages[number]["role"]}:
            with contextlib.suppress(RowError):
                shown = self.render(
                    [*self.messages[:number], {"role": role, "content": _PROBES[0]}]
                )
                if _PROBES[0] in shown:
                    alike = min(alike, in_common(self.text, shown))
        return alike if alike < EVERYWHERE else 0

    def _beside(self, number: int) -> Turn | None:
        """The span by what follows the message before it: here, and where the turn or its prompt is the last.

        What the template leaves out of the turn here (thinking, the words beside tool calls) is left out there too.
        """
        if not number:
            return None
        message = self.messages[number]
        bare = {key: value for key, value in message.items() if key not in REASONING}
        silent = {
            **bare,
            **({"content": ""} if message.get("tool_calls") and message.get("content") else {}),
        }
        try:
            after = self._after(self.messages, number - 1)
            prompt = self._after(self.messages[:number], number - 1, prompt=True)
            if not after.startswith(prompt):
                return None
            for each in (message, *(other for other in (bare, silent) if other != message)):
                turns = [*self.messages[:number], each]
                if (
                    each is not message
                    and self.render([*turns, *self.messages[number + 1 :]]) != self.text
                ):
                    continue
                until = self._after(turns, number - 1)
                if after.startswith(until) and until.startswith(prompt):
                    place = len(self.text) - len(after)
                    return self.closed(Turn(place + len(prompt), place + len(until), number))
        except RowError:
            pass
        return None

    def _after(self, messages: list[Message], number: int, *, prompt: bool = False) -> str:
        """The text after the content of a message."""
        prefix, suffix = self._around(messages, number, prompt=prompt)
        text = (
            self.text
            if messages is self.messages and not prompt
            else self.render(messages, prompt=prompt)
        )
        if not (text.startswith(prefix) and text.endswith(suffix)):
            raise RowError(
                f"messages[{number}]: its place depends on its content",
                "a template that writes it unchanged",
            )
        return suffix

    def _found(self, number: int, before: str) -> Turn:
        """The span, found by writing other texts into the turn."""
        message = self.messages[number]
        plain: Message = {"role": "assistant", "content": ""}
        wrong = None
        # First as a whole: its thinking and tool calls belong to the turn too. Not all templates accept that.
        for each in (plain, message) if set(message) - {"role", "content"} else (message,):
            turns = [*self.messages[:number], each]
            try:
                begin, end = self._content([*turns, *self.messages[number + 1 :]], number)
                shown, ending = self._around(turns, number)
            except RowError as error:
                wrong = error
                continue
            turn = self._ended(
                Turn(self._begin(number, before, shown, begin), end, number), ending
            )
            if turn.reach >= end + len(ending.rstrip()):
                return self.closed(Turn(turn.begin, turn.reach, number))
            if each is message and message.get("tool_calls"):
                # The calls follow the content: without them, a part of the turn would be left out.
                raise RowError(
                    f"messages[{number}]: the chat template renders the tool calls differently in their place",
                    "a template that renders earlier turns unchanged, or marks them: {% generation %}",
                )
            return turn
        assert wrong is not None
        raise wrong

    def _begin(self, number: int, before: str, shown: str, content: int) -> int:
        """Where the model would begin to write this turn, whose content begins at `content`."""
        if self.text.startswith(before) and len(before) <= content:
            return len(before)
        if number:
            try:
                after = self._after(self.messages, number - 1)
                prompt = self._after(self.messages[:number], number - 1, prompt=True)
            except RowError:
                pass
            else:
                begin = len(self.text) - len(after) + len(prompt)
                if after.startswith(prompt) and begin <= content:
                    return begin
        # What is between the prompt and the content of the turn, if that can be seen.
        lead = shown[len(before) :] if shown.startswith(before) else ""
        return content - len(lead) if lead and self.text[:content].endswith(lead) else content

    def _prompt_of_nothing(self) -> str:
        """The text before what the assistant writes in a conversation that it begins, up to its header's end.

        Without a header, the text before its content; all of the text if that cannot be determined either.
        """
        question: list[Message] = [{"role": "user", "content": ""}]
        header, until = _NOWHERE, len(self.text)
        with contextlib.suppress(RowError):
            (_, prompt), (_, closed) = (
                self._around(question, 0, prompt=True),
                self._around(question, 0),
            )
            header = prompt[in_common(prompt, closed) :] or header
        with contextlib.suppress(RowError):
            until, _ = self._content(self.messages, 0)
        before, shown, _ = self.text[:until].partition(header)
        return before + shown

    def _content(self, messages: list[Message], number: int) -> tuple[int, int]:
        """Where the content of a message is in the whole text; RowError if that cannot be determined."""
        prefix, suffix = self._around(messages, number)
        begin, end = len(prefix), len(self.text) - len(suffix)
        if not (self.text.startswith(prefix) and self.text.endswith(suffix) and begin <= end):
            raise RowError(
                f"messages[{number}]: the chat template renders this turn in a way that depends on its content, so "
                "what the assistant wrote cannot be located",
                "a template that renders earlier turns unchanged, or marks them with {% generation %}",
            )
        return begin, end

    def _around(
        self, messages: Messages, number: int, *, prompt: bool = False
    ) -> tuple[str, str]:
        """What precedes and follows the content of a message, found by substituting other contents."""
        if "content" not in messages[number]:
            raise RowError(
                f"messages[{number}] has only tool calls, and the chat template renders it differently in its place",
                "a template that renders earlier turns unchanged, or marks them: {% generation %}",
            )
        one, other = (
            self.render(
                [
                    *messages[:number],
                    {**messages[number], "content": probe},
                    *messages[number + 1 :],
                ],
                prompt=prompt,
            )
            for probe in _PROBES
        )
        begin, after = in_common(one, other), in_common(one[::-1], other[::-1])
        if (
            one[begin : len(one) - after] != _PROBES[0]
            or other[begin : len(other) - after] != _PROBES[1]
        ):
            raise RowError(
                f"messages[{number}]: the chat template does not write the content once and unchanged",
                "a template that writes each turn once",
            )
        return one[:begin], one[len(one) - after :]
