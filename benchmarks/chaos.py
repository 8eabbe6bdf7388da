"""Kills a run of four ranks again and again, and shows that nothing is lost.

    python benchmarks/chaos.py --kills 100 --seed 0

The seed decides the kills: a random rank, the launcher, a rank while a checkpoint is being written, or two stop signals
(SIGHUP among them) to the launcher or to all processes, each at a random instant of the run. The command itself
restarts a killed rank (--max-restarts); after a killed launcher or a stop, `threefold resume` continues. Before that
the run's folder may be moved or copied, and the copy continues; at times the original has continued, too, for two
steps at another rate, and its checkpoint, put among those of the copy, must be refused by name.

A run that was asked to stop must have saved its last step (exit code 75), unless it had not begun, or Ctrl-C was
pressed twice. Each run must end with exit code 0 and with the losses and gradient norms, bit for bit, of an
uninterrupted run. `threefold data audit` must prove that every sample was read exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ranks.faults import Command, alive, last_step, rank_processes
from ranks.runs import command, curve, prepare
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT

KINDS = ("rank", "rank while saving", "launcher", "two signals")
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PLACES = ("as it is", "moved", "copied", "parted")
MESHES = {
    "dp2 x tp2": ("--mesh.dp", "2", "--mesh.tp", "2"),
    "dp4": ("--mesh.dp", "4", "--mesh.tp", "1"),
}
STEPS = 200
TRAIN = ("--train.steps", str(STEPS), "--checkpoint.every", "5")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=0, help="begin no new run after this time; 0: no limit"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's would be ignored by the runs
    draw, until = (
        random.Random(options.seed),
        time.monotonic() + 60 * (options.minutes or 10**6),
    )
    kills: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    between: Counter[str] = Counter()
    restarts = 0
    with tempfile.TemporaryDirectory(prefix="threefold-chaos-") as name:
        folder = Path(name)
        prepare(folder)
        whole = {mesh: _uninterrupted(folder, mesh) for mesh in MESHES}
        while kills.total() < options.kills and time.monotonic() < until:
            mesh = draw.choice(list(MESHES))
            wanted = min(options.kills_a_run, options.kills - kills.total())
            run = folder / f"run-{runs.total()}"
            found, times_started, run, places = _tormented(folder, run, mesh, wanted, draw)
            kills += found
            between += places
            restarts += times_started
            outcome = _judge(folder, run, whole[mesh])
            runs[outcome] += 1
            print(
                f"{run.name}  {mesh}  {found.total()} kills, {times_started} starts: {outcome}",
                flush=True,
            )
            shutil.rmtree(run)
    print("\n| kill | times |\n|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {kills[kind]} |")
    print(f"| all | {kills.total()} |\n")
    print(
        "before the next start: "
        + ", ".join(f"{between[place]} {place}" for place in PLACES)
        + "\n"
    )
    print(
        f"{runs.total()} runs of {STEPS} steps on 4 ranks, {restarts} starts: "
        + ", ".join(f"{count} {outcome}" for outcome, count in runs.items())
    )
    return 0 if set(runs) == {"same"} and kills.total() >= options.kills else 1


def _uninterrupted(folder: Path, mesh: str) -> list[tuple[float, float]]:
    run = folder / "whole"
    done = command(folder, "train", "config.yaml", *MESHES[mesh], *TRAIN, "--log.dir", run.name)
    if done.returncode:
        sys.exit(f"the uninterrupted run failed:\n{done.stderr}")
    found = curve(run)
    shutil.rmtree(run)
    return found


def _tormented(
    folder: Path, run: Path, mesh: str, wanted: int, draw: random.Random
) -> tuple[Counter[str], int, Path, Counter[str]]:
    """Trains in `run` to the end through about `wanted` kills.

    Returns (kills by kind, number of rank starts, where the run lies in the end, what was done to its folder).
    """
    kills: Counter[str] = Counter()
    places: Counter[str] = Counter()
    arguments = (
        "train",
        "config.yaml",
        *MESHES[mesh],
        *TRAIN,
        "--log.dir",
        run.name,
        "--max-restarts",
        str(wanted),
    )
    going = Command(folder, *arguments)
    starts = 1
    try:
        while True:
            kind = draw.choice(KINDS)
            # At any instant after the command begins: most hit steps and saves, some the start.
            until = time.monotonic() + draw.uniform(0.3, 6.0)
            victim = draw.randrange(4)
            while going.running() and time.monotonic() < until:
                time.sleep(0.005)
            if kind == "rank while saving":
                _wait_for_save(run, going)
            if not going.running():
                code = going.wait(1)
                if code:
                    raise SystemExit(
                        f"{run.name} ended with exit code {code} by itself:\n{going.output()}"
                    )
                return kills, starts, run, places
            if kills.total() >= wanted:
                continue
            ranks = rank_processes(run)
            process = ranks.get(victim) if kind.startswith("rank") else going.launcher
            if process is None or not alive(process):
                continue
            kills[kind] += 1
            starts += 1
            if kind == "two signals":
                _asked_twice(run, going, draw)
                if not going.wait(1):
                    return kills, starts, run, places  # it had finished
            else:
                os.kill(process, signal.SIGKILL)
            if kind in ("launcher", "two signals"):
                going.wait(60)
                _gone(ranks)
                going.close()
                if (run / "run.json").exists():
                    place = draw.choice(PLACES)
                    places[place] += 1
                    run = _elsewhere(folder, run, mesh, place, places.total())
                    arguments = ("resume", run.name, "--max-restarts", str(wanted))
                going = Command(folder, *arguments)
    finally:
        going.close()


def _elsewhere(folder: Path, run: Path, mesh: str, place: str, number: int) -> Path:
    """Moves or copies a run's folder, and lets what is left of it part from the copy; returns where it continues."""
    if place == "as it is":
        return run
    target = folder / f"{run.name.split('.')[0]}.{number}"
    if place == "moved":
        return run.rename(target)
    shutil.copytree(run, target, symlinks=True)
    newest = CheckpointFolder(run).newest()
    if place == "parted" and newest is not None:
        steps = (
            "--train.steps",
            str(newest.step + 2),
            "--checkpoint.every",
            "1",
            "--optimizer.lr",
            "0.01",
        )
        parted = command(folder, "resume", run.name, *MESHES[mesh], *steps)
        theirs = run / "checkpoints" / f"step-{newest.step + 2:08d}"
        if parted.returncode == 0:
            shutil.copytree(theirs, target / "checkpoints" / theirs.name)
            refused = command(folder, "resume", target.name)
            if (
                refused.returncode != 2
                or "of a copy of this run, which has diverged" not in refused.stderr
            ):
                raise SystemExit(
                    f"{target.name} took a checkpoint of {run.name}:\n{refused.stdout}{refused.stderr}"
                )
            shutil.rmtree(target / "checkpoints" / theirs.name)
    shutil.rmtree(run)
    return target


def _asked_twice(run: Path, going: Command, draw: random.Random) -> None:
    """Sends two stop signals at a random distance; a run that has begun must have saved its last step."""
    numbers, pause_s, everyone = (
        draw.choices(STOPS, k=2),
        draw.uniform(0.0, 2.5),
        draw.random() < 0.5,
    )
    before = _reached(run)
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            going.signal_all(number) if everyone else os.kill(going.launcher, number)
        until = time.monotonic() + pause_s
        while going.running() and time.monotonic() < until:
            time.sleep(0.005)
    code, newest, reached = going.wait(120), CheckpointFolder(run).newest(), _reached(run)
    left = signal.SIGINT in numbers and code == 128 + signal.SIGINT
    if code == EXIT_STOPPED_WITH_CHECKPOINT:
        if newest is None or newest.step != reached.step or newest.damage() is not None:
            raise SystemExit(
                f"{run.name}: exit code 75 without its last step saved, after {numbers}:\n{going.output()}"
            )
    elif code and not left and reached.made and reached > before:
        raise SystemExit(
            f"{run.name}: exit code {code} after {numbers}, {pause_s:.2f} s apart:\n{going.output()}"
        )


class _Reached(NamedTuple):
    """Where the last start of a run stands: what earlier ones did and lost does not count."""

    start: int
    step: int
    made: bool


def _reached(run: Path) -> _Reached:
    begun = [event for event in _lines(run / "journal.jsonl") if event["event"] == "start"]
    if not begun:
        return _Reached(0, 0, False)
    steps = [
        line["step"]
        for line in _lines(run / "metrics.jsonl")
        if line["time"] >= begun[-1]["time"]
    ]
    return _Reached(begun[-1]["start"], steps[-1] if steps else begun[-1]["step"], bool(steps))


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
        if path.exists()
        else []
    )


def _wait_for_save(run: Path, going: Command) -> None:
    """Waits until a checkpoint is being written."""
    while going.running() and not any((run / "checkpoints").glob(".*")):
        time.sleep(0.001)


def _gone(ranks: dict[int, int]) -> None:
    until = time.monotonic() + 60
    while any(alive(process) for process in ranks.values()):
        if time.monotonic() > until:
            raise SystemExit(
                f"orphans: {[process for process in ranks.values() if alive(process)]}"
            )
        time.sleep(0.01)


def _judge(folder: Path, run: Path, whole: list[tuple[float, float]]) -> str:
    if last_step(run) != STEPS:
        return f"ended at step {last_step(run)}"
    if curve(run) != whole:
        return "other losses"
    proof: subprocess.CompletedProcess[str] = command(folder, "data", "audit", run.name)
    return (
        "same"
        if proof.returncode == 0 and "proved: " in proof.stdout
        else f"not proved: {proof.stderr}"
    )


if __name__ == "__main__":
    sys.exit(main())
