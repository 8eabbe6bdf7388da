"""Folders that look as a run leaves them, written line by line: for the tests of its page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from threefold.run.head import Head

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">\u202e\'&'


def at(step: int) -> str:
    return (BEGAN + timedelta(seconds=step)).isoformat(timespec="milliseconds")


def step_line(step: int, **values: Any) -> dict[str, Any]:
    """A logged step as the loop writes it, whose loss falls smoothly."""
    return {
        "step": step, "epoch": 0, "loss": 2 + 3 * math.exp(-step / 2000) + 0.01 * math.sin(step),
        "grad_norm": 1.0 + 0.1 * math.cos(step), "lr": 1e-3, "tokens": step * 4096, "samples": step * 16,
        "step_time_s": 1.0, "data_wait_s": 0.01, "tokens_per_s": 4096.0, "peak_memory_bytes": 1 << 30, "mfu": 0.4,
        "slowest_rank": step % 4, "slowest_share": 0.05, "time": at(step), **values,
    }  # fmt: skip


def write_lines(
    path: Path, lines: Sequence[dict[str, Any] | str], *, append: bool = False
) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write("".join(f"{text}\n" for text in texts))


def head_of(model: str, **values: Any) -> dict[str, Any]:
    """The head of a start as its journal has it."""
    sizes = {"name": model, "type": None, "dtype": "float32", "parameters": 1_000, "layers": 2}
    head = Head(
        path="/run", model=sizes, mesh=[2, 1, 1, 2], device="cpu", mesh_why="as asked",
        data={"source": "text", "tokenizer": "bytes", "rows": "9 rows", "seq_len": 64}, global_batch=4, first_step=51,
        last_step=80, rate=(1e-3, "as asked"), choices=[("data parallelism", "fsdp: as asked")],
    )  # fmt: skip
    return {**json.loads(json.dumps(head.to_values())), **values}


def make_run(
    path: Path, lines: Sequence[dict[str, Any] | str], *, events: Sequence[dict[str, Any]] = ()
) -> Path:
    """A run of these lines of metrics.jsonl and events of its journal."""
    (path / "checkpoints").mkdir(parents=True)
    write_lines(path / "metrics.jsonl", lines)
    started = {
        "event": "start",
        "time": at(0),
        "start": 1,
        "step": 0,
        "mesh": [2, 1, 1, 2],
        "torch": "2.11",
    }
    write_lines(path / "journal.jsonl", [started, *events])
    (path / "run.json").write_text(
        json.dumps({"id": "0" * 32, "created": at(0), "origin": None, "starts": []})
    )
    (path / "config.yaml").write_text("model: {name_or_path: tiny}\ntrain: {steps: 100}\n")
    return path


def eventful_run(path: Path) -> Path:
    """A run with a resume, a rewind, NaN, an evaluation, samples, damaged lines, hostile texts, and two starts."""
    first = [step_line(step) for step in range(1, 61)]
    first[29] = step_line(30, loss=math.nan, grad_norm=math.inf)
    first[39] = step_line(40, loss=9.0)
    again = [step_line(step, loss=1.5) for step in range(51, 81)]
    lines: list[dict[str, Any] | str] = [
        *first[:20], {"step": 20, "eval_loss": 3.0, "eval_tokens": 100, "time": at(20)}, *first[20:45],
        "{\"step\": 46, \"lo", "[1]", HOSTILE, {"step": "x", "loss": 1.0}, {"step": 46, "loss": HOSTILE},
        *first[46:], {"step": 60, "skipped": f"loss is NaN {HOSTILE}", "time": at(60)},
        {"step": 60, "eval_loss": 2.5, "eval_tokens": 100, "time": at(60)},
        *again, {"step": 80, "task_choose_acc": 0.25, "task_choose_acc_norm": 0.5, "task_roll_perplexity": 40.0,
                 "time": at(80)}, {"step": 80, "eval_loss": 1.2, "eval_tokens": 100, "time": at(80)},
    ]  # fmt: skip
    events = [
        {"event": "stop", "time": at(60), "step": 60, "saved": 60, "start": 1},
        {"event": "start", "time": at(61), "step": 50, "start": 2, "mesh": [2, 2, 1, 1], "files": ["2 files"],
         "head": head_of(f"llama {HOSTILE}"),
         "changed": {"mesh.tp": [2, 1], "data.source": ["a", HOSTILE]}},
        {"event": "rewind", "time": at(61), "step": 50, "start": 2, "aside": ["aside-1-step-00000060"]},
        {"event": "lag", "time": at(80), "rank": 3, "since": 60, "step": 75, "share": 0.3, "text": f"slow: {HOSTILE}"},
        {"event": "done", "time": at(90), "step": 80, "saved": 80, "start": 2},
    ]  # fmt: skip
    run = make_run(path, lines, events=events)
    write_lines(
        run / "samples.jsonl", [{"step": 80, "prompt": HOSTILE, "text": HOSTILE}, {"step": 80}]
    )
    (run / "exports" / "step-00000080").mkdir(parents=True)
    (run / "exports" / "step-00000080" / "config.json").write_text("{}")
    (run / "logs").mkdir()
    (run / "logs" / "rank-0000.log").write_text(
        "2026-01-01 00:00:01,000 INFO threefold: step 1/80  loss 5\n"
        f"2026-01-01 00:00:02,000 WARNING threefold: {HOSTILE}\n"
    )
    return run
