"""Seeded damage to a checkpoint: one change each, of the kinds that disks, copies and hands do."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def mutate(checkpoint: Path, other: Path, seed: int) -> str:
    """Changes one thing in the folder `checkpoint`; returns what.

    Args:
        other: the folder of another step's checkpoint, to take files from.
    """
    choice = random.Random(seed)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    # Small files hold what the big ones mean: all are hit equally often.
    file = choice.choice(files)
    kind = choice.choice(
        ["flip", "flip", "flip", "cut", "remove", "swap", "append", "zero", "empty", "exchange"]
    )
    content = bytearray(file.read_bytes())
    place = choice.randrange(len(content)) if content else 0
    if kind == "flip":
        content[place] ^= 1 << choice.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "append":
        content += choice.randbytes(choice.randrange(1, 100))
    elif kind == "zero":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    elif kind == "empty":
        content.clear()
    elif kind == "swap":
        content = bytearray((other / file.relative_to(checkpoint)).read_bytes())
    elif kind == "exchange":
        partner = choice.choice([path for path in files if path != file])
        content = bytearray(partner.read_bytes())
        partner.write_bytes(file.read_bytes())
    if kind == "remove":
        choice.choice([file.unlink, lambda: shutil.rmtree(checkpoint / "state")])()
    else:
        file.write_bytes(content)
    return f"seed {seed}: {kind} {file.relative_to(checkpoint)} at {place}"
