"""Threefold's own run, as a foreign program: `own_run.py FAULT MODEL AXIS [documents]`.

FAULT is one of admission's; AXIS the one that has 2 ranks, or `all`: dp, cp and tp with 2 each.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import threefold
from ranks import test_admission as faults

fault, model, axis, *documents = sys.argv[1:]
getattr(faults, fault, lambda: None)()
mesh = {"dp_shard": {"dp_shard": 2, "dp": 2}, "all": {"dp": 2, "cp": 2, "tp": 2}}.get(
    axis, {axis: 2}
)
chosen = {"llama": faults.LLAMA, "tied": faults.TIED, "qwen3": faults.QWEN3}[model]
letters = random.Random(0)
rows = [{"text": "".join(letters.choices("abcdefgh ", k=40))} for _ in range(38)]
threefold.train(
    {
        "model": {"config": {**chosen, "vocab_size": 257}, "admission": "off"},
        "data": {"seq_len": 64, "document_mask": bool(documents)},
        "mesh": {"device": "cpu", **mesh},
        "train": {"steps": 8, "global_batch": 8},
        "optimizer": {"lr": 0.01},
        "log": {"dir": "run"},
        "audit": {"every": 0},
    },
    dataset=rows,
)
