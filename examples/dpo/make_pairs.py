"""Writes the pairs of answers of examples/dpo.yaml: a plain one is preferred to one that shouts.

    python examples/dpo/make_pairs.py

writes pairs.jsonl (200) and held-out.jsonl (40) beside this file. No question of the second is in the first.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED, NUM_PAIRS, NUM_HELD_OUT = 0, 200, 40
_NAMES = "anchor basket candle desert engine forest garden hammer island jacket kettle ladder market needle orange"
WORDS = f"{_NAMES} pencil quartz ribbon saddle timber urchin velvet window yellow".split()
_ASKED = ("Where is the {}?", "Have you seen my {}?", "Who has the {}?", "Is there a {} here?", "Whose {} is this?")
_SAID = ("It is beside the {}.", "Look under the {}.", "I left it near the {}.", "Ask whoever took the {}.")


def pair(draw: random.Random, question: str) -> dict[str, str]:
    """A prompt with a chosen and a rejected answer."""
    answer = draw.choice(_SAID).format(draw.choice(WORDS))
    loud = f"{answer.upper().rstrip('.')}{'!' * draw.randint(1, 3)}"
    return {"prompt": f"{question}\n", "chosen": answer, "rejected": loud}


def texts() -> dict[str, str]:
    """The files' names and contents."""
    draw = random.Random(SEED)
    asked = [question.format(word) for question in _ASKED for word in WORDS]
    draw.shuffle(asked)
    last = len(asked) - NUM_HELD_OUT // 2
    files = {
        "pairs.jsonl": [pair(draw, asked[each % last]) for each in range(NUM_PAIRS)],
        "held-out.jsonl": [pair(draw, asked[last + each // 2]) for each in range(NUM_HELD_OUT)],
    }
    return {name: "".join(json.dumps(each) + "\n" for each in rows) for name, rows in files.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (Path(__file__).parent / name).write_text(text)
