"""An example as token ids, and which of them are trained on.

A token is trained on if all of its characters, except white space before its first word, lie inside an answer. The
control token that the template writes after a turn is its end, and trained on; what follows it up to the next turn is
not. Control tokens that are spelled out inside a text stay text.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from threefold.arrays import Bool, Int32, Int64
from threefold.data.chat.assistant_spans import EVERYWHERE, Turn
from threefold.data.chat.formats import NO_JSON, Example, Messages, RowError
from threefold.data.chat.row_texts import RowTexts
from threefold.data.chat.template import ChatTemplate, Conversation
from threefold.data.text.source import KnownText, Labelled

# Private-use characters for the control tokens of a text, and for those that the template writes.
_IN_TEXT, _BY_TEMPLATE = 0xF0000, 0x100000
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
# Characters that no tokenizer accepts, and that are not text in the source.
_NO_TEXT = re.compile(f"[\ud800-\udfff]|{NO_JSON}(\\w+)")
_AS_JSON = (
    "text that can be written as UTF-8, and values that JSON has   (hf:FOLDER converts texts such as "
    "2026-01-31 to dates: --data.source FOLDER reads them as they are)"
)


@dataclass(frozen=True)
class Encoder:
    """Examples as labelled tokens.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        end_id: the end token, which follows a completion that is a text.
        template: for messages; None: they are refused.
        train_on: `assistant` (all its turns), `last` (its last), `completion` or `all`.
        lost_texts: `refuse`, or only `count`, texts of a row that the template does not write.
        control_ids: control tokens spelled out in a text become control tokens.
        bos_id: a token before texts without messages; None: there is none.
    """

    backend: Any
    end_id: int
    template: ChatTemplate | None
    train_on: str
    lost_texts: str = "refuse"
    control_ids: bool = False
    bos_id: int | None = None

    def labelled(self, example: Example) -> Labelled:
        """An example's tokens.

        Raises:
            RowError: the template refuses it, or its answers cannot be located.
        """
        example, spelled = self._with_marks(example)
        tokens = (
            self._texts(example, spelled)
            if example.texts is not None
            else self._messages(example, spelled)
        )
        if not tokens.loss_mask.any():
            raise RowError(
                "no token of it would be trained on", "a text of the assistant, or a completion"
            )
        return tokens

    def prompt(self, messages: Messages) -> list[int]:
        """The ids of a conversation, up to where the assistant would begin to write; a RowError as for `labelled`."""
        assert self.template is not None
        example, spelled = self._with_marks(Example(tuple(messages)))
        ids: list[int] = self._encoded(
            self.template.render(example.messages, prompt=True), spelled
        )[0].tolist()
        return ids

    def end_of_turn(self, messages: Messages) -> int:
        """The control token that the template writes after an answer to `messages`; the end token if there is none."""
        answered = self.labelled(Example((*messages, {"role": "assistant", "content": "-"})))
        last = answered.ids[answered.loss_mask][-1]
        return int(last) if self._is_control(last) else self.end_id

    def _with_marks(self, example: Example) -> tuple[Example, bool]:
        """The example, its control tokens marked if there are some that stay text, and whether there are."""
        parts = [example.texts, example.messages, example.tools, dict(example.variables)]
        texts = json.dumps(parts, ensure_ascii=False, default=str)
        if self.control_ids or not self._control_texts.search(texts):
            return example, False
        return _mapped(example, self._marked), True

    def _texts(self, example: Example, spelled: bool) -> Labelled:
        assert example.texts is not None
        prompt, completion = example.texts
        ids, offsets = self._encoded(prompt + completion, spelled)
        text, begin = prompt + completion, len(prompt)
        if spelled:
            text, begin = self._spelled_out(text), len(self._spelled_out(prompt))
        self._begin_words(offsets, text, begin)
        loss_mask = (
            np.ones(len(ids), np.bool_) if self.train_on == "all" else offsets[:, 0] >= begin
        )
        first = [] if self.bos_id is None else [self.bos_id]
        return Labelled(
            np.concatenate([first, ids, [self.end_id]]).astype(np.int32),
            np.concatenate([np.zeros(len(first), np.bool_), loss_mask, [True]]),
        )

    def _messages(self, example: Example, spelled: bool) -> Labelled:
        if self.template is None:
            raise RowError(
                "it has messages, but the tokenizer has no chat template",
                "a chat template: data.chat_template",
            )
        talk = Conversation(self.template, example.messages, example.tools, example.variables)
        texts, unwritten = talk.texts, talk.unwritten()
        lost = self._lost(texts, unwritten)
        known_texts = [
            KnownText(
                message,
                str(example.messages[message]["role"]),
                key,
                self._spelled_out(text) if spelled else text,
                "template" if number in texts.lost else None,
            )
            for number, (message, key, text) in enumerate(texts.texts)
        ]
        known_texts += [KnownText(None, what, what, "", "template") for what in unwritten]
        first = {"all": 0, "completion": example.num_prompt}.get(
            self.train_on, len(example.messages)
        )
        if untrained := [number for number in example.untrained if number >= first]:
            raise RowError(
                f"messages[{min(untrained)}] is not to be trained on (weight: 0 or train: false)",
                f"the assistant's turns alone, not {self.train_on}",
                train_on="assistant",
            )
        turns = () if self.train_on == "all" else self._turns(example, talk)
        ids, offsets = self._encoded(texts.text, spelled)
        loss_mask = np.full(len(ids), self.train_on == "all")
        places = self._places(texts.text) if spelled else None

        def place(at: int) -> int:
            return at if places is None else int(places[min(at, len(places) - 1)])

        text = self._spelled_out(texts.text) if spelled else texts.text
        for turn in turns:
            self._begin_words(offsets, text, place(turn.begin))
            self._mark(loss_mask, ids, offsets, turn, place)
        return Labelled(ids, loss_mask, lost, known_texts)

    def _lost(self, texts: RowTexts, unwritten: Sequence[str]) -> Mapping[str, int]:
        """How many texts of each kind the template does not write; a RowError if none may be lost."""
        lost = texts.lost
        if self.lost_texts == "refuse":
            for what in unwritten:
                raise RowError(
                    f"it has {what}, but the chat template does not write them",
                    "a chat template that supports tools: data.chat_template   (or --data.lost_texts count)",
                )
            texts.refuse(lost)
        return Counter([*lost.values(), *unwritten])

    def _turns(self, example: Example, talk: Conversation) -> Sequence[Turn]:
        """The turns that are trained on."""
        if self.train_on == "completion":
            if not example.num_prompt:
                raise RowError(
                    "it has no prompt", "prompt and completion", train_on="assistant"
                )
            return [talk.completion(example.num_prompt)]
        turns = talk.turns()
        last = (
            max((turn.message for turn in turns), default=0) if self.train_on == "last" else 0
        )
        return [
            turn
            for turn in turns
            if turn.message >= last and turn.message not in example.untrained
        ]

    def _begin_words(self, offsets: Int64, text: str, begin: int) -> None:
        """Lets the token of a turn's first word begin with the turn, if the template's white space is in it."""
        at = int(np.searchsorted(offsets[:, 0], begin)) - 1
        start, end = offsets[at] if at >= 0 else (begin, begin)
        if end > begin and not text[start:begin].strip() and text[begin:end].strip():
            offsets[at, 0] = begin

    def _mark(
        self,
        loss_mask: Bool,
        ids: Int32,
        offsets: Int64,
        turn: Turn,
        place: Callable[[int], int],
    ) -> None:
        """Sets the loss mask of one turn."""
        begin, end = place(turn.begin), place(turn.end)
        covered = (offsets[:, 0] >= begin) & (offsets[:, 1] <= end) & (offsets[:, 0] < end)
        loss_mask[covered] = True
        last = (
            int(np.flatnonzero(covered)[-1])
            if covered.any()
            else int(np.searchsorted(offsets[:, 0], end)) - 1
        )
        opened = self._control_texts.search(turn.ending)
        if opened is not None:
            self._mark_after(loss_mask, ids, offsets, turn, last, place, opened.start())
            return
        # The turn's own end token, if the span reaches that far: after it there is only white space.
        controls = self._run_of_controls(ids, last, int(covered.sum()))
        if controls:
            own = [
                at
                for at in controls
                if place(turn.written) <= offsets[at, 0]
                and offsets[at, 1] <= place(turn.shared)
            ]
            tail = max(own, default=controls[0])
            if self.train_on != "completion":
                loss_mask[tail + 1 : last + 1] = False
            return
        # Or else it is written with the next message, of any role, and never before the first answer.
        written_later = (
            (offsets[:, 0] >= end)
            & (offsets[:, 1] <= place(turn.next))
            & (turn.next < EVERYWHERE)
        )
        for at in np.flatnonzero(written_later).tolist():
            if self._is_control(ids[at]) and ids[at] not in ids[: np.argmax(loss_mask)]:
                loss_mask[last + 1 : at + 1] = True
            if self._shown(ids[at]).strip():
                break

    def _run_of_controls(self, ids: Int32, last: int, length: int) -> list[int]:
        """The control tokens at the end of a span, the last one first, with only white space between them."""
        controls = []
        for at in range(last, last - length, -1):
            if self._is_control(ids[at]):
                controls.append(at)
            elif self._shown(ids[at]).strip():
                break
        return controls

    def _mark_after(
        self,
        loss_mask: Bool,
        ids: Int32,
        offsets: Int64,
        turn: Turn,
        last: int,
        place: Callable[[int], int],
        opened: int,
    ) -> None:
        """Sets the loss mask of what follows a turn's span up to its end token, which `ending` has at `opened`."""
        reach = place(min(turn.reach, turn.shared) if turn.shared > turn.end else turn.reach)
        after = np.arange(last + 1, len(ids))
        controls = [
            int(at) for at in after[offsets[after, 1] <= reach] if self._is_control(ids[at])
        ]
        if not controls and turn.reach >= turn.end + opened:
            # The text agrees up to an end token; in this place it is another one (of a turn, not of a conversation).
            begins = np.flatnonzero(offsets[:, 0] == place(turn.end + opened))
            controls = [
                int(at)
                for at in begins[:1]
                if self._is_control(ids[at]) and offsets[at, 1] <= place(turn.next)
            ]
        if controls:
            loss_mask[last + 1 : controls[-1] + 1] = True

    def _is_control(self, id: Any) -> bool:
        return int(id) in self._control

    def _shown(self, id: Any) -> str:
        return str(self.backend.decode([int(id)], skip_special_tokens=False))

    @cached_property
    def _control(self) -> dict[int, str]:
        """Id -> text of the control tokens."""
        return {
            id: str(token.content)
            for id, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        }

    @cached_property
    def _greedy(self) -> list[int]:
        """The control tokens that take white space beside them."""
        tokens = self.backend.get_added_tokens_decoder()
        return [id for id in self._control if tokens[id].lstrip or tokens[id].rstrip]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {
            text: number
            for number, text in enumerate(sorted(self._control.values(), key=len, reverse=True))
        }

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._numbers)) or r"(?!)")

    def _encoded(self, text: str, spelled: bool) -> tuple[Int32, Int64]:
        """Ids [n], and the characters that each covers [n, 2], in the text or, if `spelled`, in its expansion."""
        if spelled:
            text = self._spelled_out(text)
        if match := _NO_TEXT.search(text):
            what = f"a value of the type {match[1]}" if match[1] else "half of a surrogate pair"
            raise RowError(f"{what} in the text", _AS_JSON)
        backend = self._apart if spelled else self._bare
        encoding = backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for at in np.flatnonzero(np.isin(ids, self._greedy)):
            # Such a token takes the white space beside it: the token itself is where its own text is.
            start, end = offsets[at]
            taken = text[start:end]
            offsets[at] = (
                start + len(taken) - len(taken.lstrip()),
                end - len(taken) + len(taken.rstrip()),
            )
        if spelled:
            for id, (start, end) in zip(ids.tolist(), offsets.tolist(), strict=True):
                if id in self._control and not _PRIVATE.fullmatch(text[start:end].strip()):
                    what = f"{self._control[id]!r} inside a text becomes the control token: the vocabulary has it too"
                    raise RowError(what, "a text without it   (or --data.control_tokens ids)")
        return ids, offsets

    def _marked(self, text: str) -> str:
        """A user's text with its control tokens as private characters."""
        if _PRIVATE.search(text):
            raise RowError(
                "it has private-use characters and spells out a control token",
                "a text without them",
            )
        return self._control_texts.sub(
            lambda match: chr(_IN_TEXT + self._numbers[match[0]]), text
        )

    def _spelled_out(self, text: str) -> str:
        """A marked text with the template's control tokens as private characters, and the users' spelled out."""
        texts = list(self._numbers)
        by_template = self._control_texts.sub(
            lambda match: chr(_BY_TEMPLATE + self._numbers[match[0]]), text
        )
        return _PRIVATE.sub(
            lambda match: (
                match[0] if ord(match[0]) >= _BY_TEMPLATE else texts[ord(match[0]) - _IN_TEXT]
            ),
            by_template,
        )

    def _places(self, text: str) -> Int64:
        """Where each character of a marked text begins once it is spelled out; a control token is one place."""
        lengths = np.ones(len(text), np.int64)
        names = list(self._numbers)
        for match in self._control_texts.finditer(text):
            lengths[match.start() : match.end()] = 0
            lengths[match.end() - 1] = 1
        for match in _PRIVATE.finditer(text):
            lengths[match.start()] = len(names[ord(match[0]) - _IN_TEXT])
        return np.concatenate([[0], np.cumsum(lengths)])

    @cached_property
    def _bare(self) -> Any:
        """The tokenizer without its last step, which may trim the places of its tokens."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(
            json.dumps({**json.loads(self.backend.to_str()), "post_processor": None})
        )

    @cached_property
    def _apart(self) -> Any:
        """The tokenizer, but with private characters for its control tokens: their texts are texts to it."""
        from tokenizers import Tokenizer

        names = {text: chr(_BY_TEMPLATE + number) for text, number in self._numbers.items()}
        values = json.loads(self.backend.to_str())
        for token in values["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = values["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(text, text): id for text, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        values["post_processor"] = None
        return Tokenizer.from_str(json.dumps(values))


def _mapped(example: Example, change: Callable[[str], str]) -> Example:
    """The example with every text in it changed, and the names of keys; roles stay."""

    def mapped(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key == "role" else change(value)
        if isinstance(value, Mapping):
            return {change(name): mapped(each, name) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(mapped(each) for each in value)
        return value

    parts = ("messages", "texts", "tools", "variables")
    return replace(example, **{name: mapped(getattr(example, name)) for name in parts})
