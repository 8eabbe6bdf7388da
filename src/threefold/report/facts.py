"""A run's folder as plain facts, for its page. Files only, no torch, and nothing of the run is touched.

Every file may be missing, cut or damaged: what can be read is shown, what cannot is listed in `damaged` and `notes`.
Nothing here decides how it looks (`sections`).
"""

import contextlib
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.config.paths import (
    EXPORT_FOLDER,
    JOURNAL,
    METRICS,
    PROFILE_FOLDER,
    RUN_CONFIG,
    RUN_FILE,
    is_of_program,
)
from threefold.config.yaml_text import parse
from threefold.errors import ThreefoldError
from threefold.jsonl import Damage, Lines, Values
from threefold.records.files import (
    MOST_BYTES,
    MOST_OF_CONFIG,
    SAMPLES,
    content_of,
    json_of,
    unsafe_files,
)
from threefold.records.logs import LoggedWarning, read_logs
from threefold.records.metrics import Metrics
from threefold.records.state import STILL_S, state_of
from threefold.run.head import Head

_MOST_SAMPLES = 60
_MOST_TEXT = 4000
_MOST_RANKS = 1 << 20


class Saved(NamedTuple):
    """A checkpoint: its folder's name, step, bytes (None: not known), and whether it is whole, aside or the best."""

    name: str
    step: int
    size_bytes: int | None
    state: str
    best: bool


class RankPlace(NamedTuple):
    """Where a rank is: its step and the phase of it."""

    step: int
    name: str


@dataclass
class RunFacts:
    """One run.

    Attributes:
        state, why: its state in one word (running, done, stopped, ended, empty), and what shows it.
        config: its config.yaml as plain values; empty if it cannot be read. `config_text`: the file.
        events: the journal, oldest first.
        architecture, versions, mesh: of the newest checkpoint or start.
        phases: of each traced rank: seconds a step by phase.
        damaged: lines that cannot be read, and how many there are in all.
    """

    path: Path
    name: str
    state: str = "empty"
    why: str = ""
    created: str = ""
    origin: Values | None = None
    config: Values = field(default_factory=dict)
    config_text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    architecture: Values = field(default_factory=dict)
    versions: Values = field(default_factory=dict)
    mesh: tuple[int, int, int, int] | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics(Path(os.devnull)))
    saved: list[Saved] = field(default_factory=list)
    exported: list[Saved] = field(default_factory=list)
    best: tuple[int, float] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)
    num_damaged: int = 0
    notes: list[str] = field(default_factory=list)
    places: dict[int, RankPlace] = field(default_factory=dict)
    """where each rank of this host is now, as far as that can be seen."""

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @property
    def head(self) -> Head | None:
        """The training of the last start, and its choices."""
        return Head.from_values(self.starts[-1].get("head")) if self.starts else None

    @property
    def resolved(self) -> dict[str, str]:
        """Its config by key, with what the last start chose for keys that were left to it."""
        return resolved(self.config, self.starts[-1] if self.starts else {})

    @property
    def num_steps(self) -> int | None:
        """The last step that it is to make, if that is known."""
        if self.head is not None and isinstance(self.head.last_step, int):
            return self.head.last_step
        steps = value_of(self.config, "train", "steps")
        return steps if isinstance(steps, int) else None

    def commands(self) -> list[tuple[str, str]]:
        """What to do next: (a command to paste, what it does)."""
        run = shlex.quote(str(self.path))
        commands = []
        if self.state in ("ended", "failed"):
            commands.append((f"threefold explain {run}", "what its logs say about its end"))
        of_program = is_of_program(self.path)
        if self.state not in ("running", "copied") and not of_program:
            more = (
                f" --train.steps {2 * self.num_steps}"
                if self.state == "done" and self.num_steps
                else ""
            )
            commands.append(
                (
                    f"threefold resume {run}{more}",
                    "go on" + (" for as many steps again" if more else ""),
                )
            )
        if any(each.state == "whole" for each in self.saved):
            if not of_program:
                commands.append(
                    (
                        f"threefold sample {run} --prompt 'Once upon a time'",
                        "what the model writes",
                    )
                )
            commands.append(
                (
                    f"threefold export {run} --to {shlex.quote(self.name + '-hf')}",
                    "as a Hugging Face folder",
                )
            )
        # For a program's run only the numbers of rows are known, not where they are.
        contents, show = ("", "") if of_program else (" --contents", " --show")
        what, text = ("row", "") if of_program else ("token", ", and their text")
        commands.append(
            (f"threefold data audit {run}{contents}", f"prove every {what} that it has read")
        )
        if step := self.metrics.last.get("step"):
            commands.append((f"threefold why {run}", "what stands out, and why"))
            commands.append(
                (f"threefold data order {run} --step {step}{show}", f"the rows of a step{text}")
            )
        return commands


def gather(run: Path, metrics: Metrics | None = None, *, name: str | None = None) -> RunFacts:
    """The facts of a run's folder.

    Args:
        metrics: its metrics, if they are read already, as by a live page.
        name: of the run on the page; default: its folder's.
    """
    facts = RunFacts(run, name or run.absolute().name)
    facts.metrics = metrics = metrics or Metrics(run / METRICS)
    facts.damaged, facts.num_damaged = [*metrics.lines.damaged], metrics.lines.num_damaged
    if metrics.lines.torn:
        facts.notes.append(f"the last line of {METRICS} is incomplete and left out")
    journal = Lines(run / JOURNAL, most_bytes=MOST_BYTES)
    facts.events = [
        line.values for line in journal.read() if isinstance(line.values.get("event"), str)
    ]
    _damaged(facts, journal)
    samples = Lines(run / SAMPLES, most_bytes=MOST_BYTES)
    facts.samples = _samples(samples)
    _damaged(facts, samples)
    facts.notes += [
        f"{lines.path.name} is long: its first {lines.left_bytes:,} bytes are not read"
        for lines in (journal, samples)
        if lines.left_bytes
    ]
    with _noted(facts, RUN_FILE):
        identity = json_of(run / RUN_FILE)
        facts.created, facts.origin = str(identity["created"]), identity.get("origin")
    if not is_of_program(run):
        with _noted(facts, RUN_CONFIG):
            facts.config_text = content_of(run / RUN_CONFIG, MOST_OF_CONFIG).decode("utf-8")
            config = parse(facts.config_text, RUN_CONFIG)
            facts.config = config if isinstance(config, dict) else {}
    logs = read_logs(run)
    facts.warnings = logs.warnings
    facts.notes += logs.notes
    unsafe = [Damage(name, 0, what) for name, what in unsafe_files(run)]
    others = [
        damage
        for damage in unsafe
        if damage.file not in (METRICS, JOURNAL, SAMPLES, RUN_FILE, RUN_CONFIG)
    ]
    facts.damaged, facts.num_damaged = facts.damaged + others, facts.num_damaged + len(others)
    if not any(damage.file.startswith("checkpoints/") for damage in unsafe):
        with _noted(facts, "checkpoints"):
            _checkpoints(facts)
    facts.exported = list(_exported(run))
    facts.phases = dict(_phases(run))
    times = metrics.times
    between = times[-1] - times[-2] if len(times) > 1 else 0.0
    facts.state, facts.why = state_of(run, facts.events, still_s=max(STILL_S, 5 * between))
    return facts


def resolved(config: Values, start: Values) -> dict[str, str]:
    """A config by key, as text; a value that was left to a start (null, auto) as that start chose it.

    Args:
        start: a start's line in the journal.
    """
    head = Head.from_values(start.get("head"))
    chosen: dict[str, Any] = {}
    if (sizes := sizes_of(start.get("mesh"))) is not None:
        replicas, shards, cp, tp = sizes
        chosen |= {
            "mesh.dp": replicas * shards,
            "mesh.dp_shard": shards,
            "mesh.cp": cp,
            "mesh.tp": tp,
        }
    if head is not None:
        chosen |= {"train.steps": head.last_step, "train.global_batch": head.global_batch}
        chosen["optimizer.lr"] = head.rate[0] if head.rate else None
    return {
        key: f"{chosen[key]} (auto)"
        if value in ("None", "auto") and chosen.get(key) is not None
        else value
        for key, value in _flat(config)
    }


def _flat(values: Values, before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)[:200]


def value_of(values: Values, *names: str) -> Any:
    """The value under nested keys; None if there is none."""
    inner: Any = values
    for name in names:
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner


@contextlib.contextmanager
def _noted(facts: RunFacts, name: str) -> Iterator[None]:
    """Notes that a file cannot be read; one that is not there may be of another program."""
    try:
        yield
    except FileNotFoundError:
        facts.notes.append(f"there is no {name}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ThreefoldError) as error:
        facts.damaged.append(
            Damage(name, 0, f"it cannot be read: {' '.join(str(error).split())[:200]}")
        )
        facts.num_damaged += 1


def _damaged(facts: RunFacts, lines: Lines) -> None:
    facts.damaged += lines.damaged
    facts.num_damaged += lines.num_damaged


def _samples(lines: Lines) -> list[dict[str, Any]]:
    """The samples of each step, of the last pass over it; the newest if there are many."""
    samples: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines.read():
        step, prompt, text = (line.values.get(name) for name in ("step", "prompt", "text"))
        if type(step) is not int or not isinstance(prompt, str) or not isinstance(text, str):
            lines.wrong(line.number, "it is not a sample: step, prompt and text")
            continue
        samples[step, prompt] = {
            "step": step,
            "prompt": prompt[:_MOST_TEXT],
            "text": text[:_MOST_TEXT],
        }
    return sorted(samples.values(), key=lambda sample: sample["step"])[-_MOST_SAMPLES:]


def _checkpoints(facts: RunFacts) -> None:
    folder = CheckpointFolder(facts.path)
    with _noted(facts, "checkpoints/best.json"):
        facts.best = folder.best()
    manifest: Values = {}
    listed = [(checkpoint, "") for checkpoint in folder.all()]
    for path in sorted(folder.path.glob("aside-*-step-*")):
        if (step := path.name.rpartition("-")[2]).isdecimal():
            listed.append((Checkpoint(path, int(step)), "set aside by a rewind"))
    for checkpoint, state in listed:
        size: int | None = None
        try:
            described = checkpoint.manifest()
            size = sum(entry[0] for entry in described["files"].values())
            manifest = described if not state else manifest
            state = state or "whole"
        except (ThreefoldError, KeyError, TypeError, IndexError, AttributeError) as error:
            state = (
                "being written, or incomplete"
                if not checkpoint.complete
                else f"damaged: {' '.join(str(error).split())[:120]}"
            )
        best = facts.best is not None and checkpoint.step == facts.best[0] and state == "whole"
        facts.saved.append(Saved(checkpoint.path.name, checkpoint.step, size, state, best))
    start = facts.starts[-1] if facts.starts else {}
    facts.architecture = _mapping(manifest.get("architecture"))
    facts.versions = {
        name: start[name]
        for name in ("threefold", "torch", "transformers", "python")
        if name in start
    }
    facts.versions = facts.versions or _mapping(manifest.get("versions"))
    facts.mesh = sizes_of(start.get("mesh")) or sizes_of(manifest.get("mesh"))


def _exported(run: Path) -> Iterator[Saved]:
    """The folders for transformers that the run has written (checkpoint.export_every)."""
    with contextlib.suppress(OSError):
        for path in sorted((run / EXPORT_FOLDER).glob("step-*")):
            if (step := path.name.rpartition("-")[2]).isdecimal() and (
                path / "config.json"
            ).is_file():
                size = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
                yield Saved(
                    f"{EXPORT_FOLDER}/{path.name}", int(step), size, "for transformers", False
                )


def _mapping(value: Any) -> Values:
    return value if isinstance(value, Mapping) else {}


def sizes_of(value: Any) -> tuple[int, int, int, int] | None:
    """The sizes of a mesh; None if they are not."""
    match value:
        case [int(replicas), int(shards), int(cp), int(tp)] if all(
            0 < size < _MOST_RANKS for size in value
        ):
            return replicas, shards, cp, tp
    return None


def _phases(run: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """The phases of the ranks that were traced (log.profile)."""
    for path in sorted((run / PROFILE_FOLDER).glob("rank-*.summary.json"))[:64]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            phases = json_of(path)["phases"].items()
            yield (
                path.name.partition(".")[0],
                {str(name): float(s) for name, s in phases if math.isfinite(float(s))},
            )
