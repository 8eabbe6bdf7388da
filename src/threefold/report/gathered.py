"""A run's folder as plain facts: what a page of it shows. Files only, no torch, and nothing of the run is touched.

Every file may be missing, cut or damaged: what can be read is shown, and what cannot is said in `damaged` and `notes`.
Nothing here decides how it looks (`sections`).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from threefold.audit import record
from threefold.checkpoint.layout import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import JOURNAL
from threefold.config.paths import EXPORT_FOLDER, PROFILE_FOLDER, RUN_CONFIG, RUN_FILE
from threefold.config.text import parse
from threefold.errors import ConfigError, ThreefoldError
from threefold.report.curves import Curves
from threefold.report.lanes import Traced, traced
from threefold.report.opened import MOST_BYTES, MOST_OF_CONFIG, content_of, strange
from threefold.report.rank_logs import Head, Said, read_logs
from threefold.report.standing import METRICS, STILL_S, state_of
from threefold.report.tail import Damage, Tail

SAMPLES = "samples.jsonl"
_MOST_EVENTS, _MOST_SAMPLES, _MOST_TEXT = 400, 60, 4000


class Saved(NamedTuple):
    """A checkpoint: its folder's name, step, bytes (None: not known), and whether it is whole, aside or the best."""

    name: str
    step: int
    size_bytes: int | None
    state: str
    best: bool


class Place(NamedTuple):
    """Where a rank is: its step and the phase of it."""

    step: int
    name: str


@dataclass
class Facts:
    """One run.

    Attributes:
        state, why: one word of how it stands (running, done, stopped, ended, empty), and what says so.
        config: its config.yaml as plain values; empty if it cannot be read. `config_text`: the file.
        heads: what each start printed first.
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
    origin: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    heads: list[Head] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    architecture: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int, int, int] | None = None
    curves: Curves = field(default_factory=Curves)
    saved: list[Saved] = field(default_factory=list)
    exported: list[Saved] = field(default_factory=list)
    best: tuple[int, float] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)
    num_damaged: int = 0
    notes: list[str] = field(default_factory=list)
    timeline: Traced | None = None
    places: dict[int, Place] = field(default_factory=dict)
    """where each rank of this host is now, as far as that can be seen."""

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @property
    def num_steps(self) -> int | None:
        """The last step that it is to make, if that is known."""
        for name, text in reversed(self.heads[-1].entries if self.heads else ()):
            if name == "steps" and (found := re.search(r"\d+ to (\d+)", text)) is not None:
                return int(found[1])
        steps = value_of(self.config, "train", "steps")
        return steps if isinstance(steps, int) else None

    def commands(self) -> list[tuple[str, str]]:
        """What to do next: (a command to paste, what it does)."""
        run = shlex.quote(str(self.path))
        found = []
        if self.state == "ended":
            found.append((f"threefold explain {run}", "what its logs say of its end"))
        if self.state != "running":
            more = f" --train.steps {2 * self.num_steps}" if self.state == "done" and self.num_steps else ""
            found.append((f"threefold resume {run}{more}", "go on" + (" for as many steps again" if more else "")))
        if any(each.state == "whole" for each in self.saved):
            found.append((f"threefold sample {run} --prompt 'Once upon a time'", "what the model writes"))
            found.append((f"threefold export {run} --to {shlex.quote(self.name + '-hf')}", "as a Hugging Face folder"))
        found.append((f"threefold data audit {run} --contents", "prove every token that it has read"))
        if step := self.curves.last.get("step"):
            found.append((f"threefold why {run}", "what stands out, and why"))
            found.append((f"threefold data order {run} --step {step} --show", "the rows of a step, and their text"))
        return found


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each of some runs: its folder's, or its path where two folders have the same."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def is_run(folder: Path) -> bool:
    """Whether a folder looks like one of a run."""
    return any((folder / name).is_file() for name in (RUN_CONFIG, RUN_FILE, METRICS, record.FILE))


def run_folder(path: Path) -> Path:
    """The run's folder that a path names: itself, or that of one of its files or checkpoints.

    Raises:
        ConfigError: it is not one of a run.
    """
    for folder in (path, path.parent, path.parent.parent):
        if is_run(folder) and (folder == path or path.exists()):
            return folder.absolute()
    near = sorted(each.parent for each in Path("runs").glob(f"*/{RUN_CONFIG}"))
    fix = f"{near[-1]} is the newest run here" if near else "check the path; a run's folder has a metrics.jsonl"
    raise ConfigError(f"{path} is not a run", expected="the folder of a run (log.dir)", fix=fix)


def gather(run: Path, curves: Curves | None = None, *, name: str | None = None) -> Facts:
    """The facts of a run's folder.

    Args:
        curves: what is read of its metrics already, as by whoever follows them.
        name: of the run on the page; default: its folder's.
    """
    facts = Facts(run, name or run.absolute().name)
    if curves is None:
        tail = Tail(run / METRICS)
        facts.curves.read(tail)
        _damaged(facts, tail)
        if tail.torn:
            facts.notes.append(f"the last line of {METRICS} is not whole: it is left out")
    else:
        facts.curves = curves
    journal = Tail(run / JOURNAL, most_bytes=MOST_BYTES)
    facts.events = [line.values for line in journal.read() if isinstance(line.values.get("event"), str)]
    _damaged(facts, journal)
    samples = Tail(run / SAMPLES, most_bytes=MOST_BYTES)
    facts.samples = _samples(samples)
    _damaged(facts, samples)
    facts.notes += [
        f"{each.path.name} is long: its first {each.left_bytes:,} bytes are not read"
        for each in (journal, samples)
        if each.left_bytes
    ]
    with _noted(facts, RUN_FILE):
        identity = json.loads(content_of(run / RUN_FILE))
        facts.created, facts.origin = str(identity["created"]), identity.get("origin")
    with _noted(facts, RUN_CONFIG):
        facts.config_text = content_of(run / RUN_CONFIG, MOST_OF_CONFIG).decode("utf-8")
        config = parse(facts.config_text, RUN_CONFIG)
        facts.config = config if isinstance(config, dict) else {}
    logs = read_logs(run)
    facts.heads, facts.said = logs.heads, logs.said
    facts.notes += logs.notes
    odd = [Damage(name, 0, what) for name, what in strange(run)]
    told = [each for each in odd if each.file not in (METRICS, JOURNAL, SAMPLES, RUN_FILE, RUN_CONFIG)]
    facts.damaged, facts.num_damaged = facts.damaged + told, facts.num_damaged + len(told)
    if not any(each.file.startswith("checkpoints/") for each in odd):
        with _noted(facts, "checkpoints"):
            _checkpoints(facts)
    facts.exported = list(_exported(run))
    facts.phases = dict(_phases(run))
    facts.timeline = traced(run)
    times = facts.curves.times
    between = times[-1] - times[-2] if len(times) > 1 else 0.0
    facts.state, facts.why = state_of(run, facts.events, still_s=max(STILL_S, 5 * between))
    return facts


def value_of(values: Mapping[str, Any], *names: str) -> Any:
    """The value under some keys in one another; None if there is none."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


@contextlib.contextmanager
def _noted(facts: Facts, name: str) -> Iterator[None]:
    """Notes that a file cannot be read; one that is not there is one of version 0.1.0, or of another program."""
    try:
        yield
    except FileNotFoundError:
        facts.notes.append(f"there is no {name}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ThreefoldError) as error:
        facts.damaged.append(Damage(name, 0, f"it cannot be read: {' '.join(str(error).split())[:200]}"))
        facts.num_damaged += 1


def _damaged(facts: Facts, tail: Tail) -> None:
    facts.damaged += tail.damaged
    facts.num_damaged += tail.num_damaged


def _samples(tail: Tail) -> list[dict[str, Any]]:
    """The samples of each step, of the last pass over it; the newest if there are many."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in tail.read():
        step, prompt, text = (line.values.get(name) for name in ("step", "prompt", "text"))
        if type(step) is not int or not isinstance(prompt, str) or not isinstance(text, str):
            tail.wrong(line.number, "it is not a sample: step, prompt and text")
            continue
        found[step, prompt] = {"step": step, "prompt": prompt[:_MOST_TEXT], "text": text[:_MOST_TEXT]}
    return sorted(found.values(), key=lambda sample: sample["step"])[-_MOST_SAMPLES:]


def _checkpoints(facts: Facts) -> None:
    folder = CheckpointFolder(facts.path)
    with _noted(facts, "checkpoints/best.json"):
        facts.best = folder.best()
    manifest: Mapping[str, Any] = {}
    found = [(checkpoint, "") for checkpoint in folder.all()]
    for path in sorted(folder.path.glob("aside-*-step-*")):
        if (step := path.name.rpartition("-")[2]).isdecimal():
            found.append((Checkpoint(path, int(step)), "set aside by a rewind"))
    for checkpoint, state in found:
        size: int | None = None
        try:
            described = checkpoint.manifest()
            size = sum(entry[0] for entry in described["files"].values())
            manifest = described if not state else manifest
            state = state or "whole"
        except (ThreefoldError, KeyError, TypeError, IndexError, AttributeError) as error:
            state = (
                "being written, or cut" if not checkpoint.complete else f"damaged: {' '.join(str(error).split())[:120]}"
            )
        best = facts.best is not None and checkpoint.step == facts.best[0] and state == "whole"
        facts.saved.append(Saved(checkpoint.path.name, checkpoint.step, size, state, best))
    start = facts.starts[-1] if facts.starts else {}
    facts.architecture = _mapping(manifest.get("architecture"))
    facts.versions = {name: start[name] for name in ("threefold", "torch", "transformers", "python") if name in start}
    facts.versions = facts.versions or _mapping(manifest.get("versions"))
    facts.mesh = _sizes(start.get("mesh"), manifest.get("mesh"))


def _exported(run: Path) -> Iterator[Saved]:
    """The folders for transformers that the run has written (checkpoint.export_every)."""
    with contextlib.suppress(OSError):
        for path in sorted((run / EXPORT_FOLDER).glob("step-*")):
            if (step := path.name.rpartition("-")[2]).isdecimal() and (path / "config.json").is_file():
                size = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
                yield Saved(f"{EXPORT_FOLDER}/{path.name}", int(step), size, "for transformers", False)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sizes(text: Any, sizes: Any) -> tuple[int, int, int, int] | None:
    """The mesh of the last start as it says it, `dp=4 (2 replicas x 2 shards) x cp=1 x tp=2`; else the checkpoint's."""
    number = r"([1-9]\d{0,5})"
    form = rf"dp={number}(?: \((?:{number} replicas x {number} shards|(sharded))\))? x cp={number} x tp={number}"
    if isinstance(text, str) and (found := re.fullmatch(form, text)) is not None:
        dp, replicas, shards, sharded, cp, tp = found.groups()
        pair = (int(replicas), int(shards)) if replicas else (1, int(dp)) if sharded else (int(dp), 1)
        return (*pair, int(cp), int(tp))
    match sizes:
        case [int(), int(), int(), int()] if min(sizes) > 0:
            return (sizes[0], sizes[1], sizes[2], sizes[3])
    return None


def _phases(run: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """The phases of the ranks that were traced (log.profile)."""
    for path in sorted((run / PROFILE_FOLDER).glob("rank-*.summary.json"))[:64]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            phases = json.loads(content_of(path))["phases"].items()
            yield path.name.partition(".")[0], {str(name): float(s) for name, s in phases if math.isfinite(float(s))}
