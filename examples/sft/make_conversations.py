"""Writes the conversations of examples/sft.yaml: short questions and answers, the same for the same seed.

    python examples/sft/make_conversations.py

writes conversations.jsonl (200) and held-out.jsonl (40) beside this file. No question of the second is in the first.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED, NUM_CONVERSATIONS, NUM_HELD_OUT = 0, 200, 40
_NAMES = "anchor basket candle desert engine forest garden hammer island jacket kettle ladder market needle orange"
WORDS = f"{_NAMES} pencil quartz ribbon saddle timber urchin velvet window yellow".split()


def exchange(draw: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    first, second = draw.sample(WORDS, 2)
    low, high = sorted(draw.sample(range(2, 50), 2))
    return draw.choice(
        [
            (f"What is {low} plus {high}?", f"{low} plus {high} is {low + high}."),
            (f"Which is larger, {low} or {high}?", f"{high} is larger than {low}."),
            (f"Write {first} in capitals.", f"{first.upper()}."),
            (f"What is the first letter of {first}?", f"The first letter of {first} is {first[0]}."),
            (
                f"Which comes first in a dictionary, {first} or {second}?",
                f"{min(first, second)} comes before {max(first, second)}.",
            ),
            (f"Say {first} and {second} the other way round.", f"{second} and {first}."),
        ]
    )


def conversations(draw: random.Random, count: int, asked_before: set[str]) -> list[dict[str, list[dict[str, str]]]]:
    """`count` conversations of one to three exchanges, none of which was asked before."""
    made = []
    for _ in range(count):
        messages: list[dict[str, str]] = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            asked, said = exchange(draw)
            while asked in asked_before:
                asked, said = exchange(draw)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        made.append({"messages": messages})
    return made


def texts() -> dict[str, str]:
    """The files' names and contents."""
    draw = random.Random(SEED)
    train = conversations(draw, NUM_CONVERSATIONS, set())
    asked = {message["content"] for each in train for message in each["messages"] if message["role"] == "user"}
    held_out = conversations(draw, NUM_HELD_OUT, asked)
    files = {"conversations.jsonl": train, "held-out.jsonl": held_out}
    return {name: "".join(json.dumps(each) + "\n" for each in rows) for name, rows in files.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (Path(__file__).parent / name).write_text(text)
