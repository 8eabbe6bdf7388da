"""A Slurm job from a config: one batch script that contains everything and requeues itself after a stop.

srun starts one rank per task; `mesh.launchers` finds rank, world size and master in srun's own variables. Before the
time limit, Slurm sends SIGUSR1 to the ranks, which save and exit with code 75. The script then puts the job back into
the queue, and the next start resumes in the same folder. The script contains the config, so editing the file later
changes nothing.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from threefold.config.schema import Config
from threefold.config.text import dump
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, ConfigError
from threefold.jobs.job import Ranks, checked_name, handed_to

# srun's limit for the other ranks after the first has ended: a dead rank must not leave the others waiting.
_WAIT_S = 120
_SAVE_AND_LEAVE_S = 60


@dataclass(frozen=True)
class SlurmOptions:
    """Settings of a Slurm job, outside the config; see `threefold submit slurm --help`. None: left to the cluster."""

    name: str = "threefold"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    signal_ahead_s: int | None = None
    requeue: bool = True
    setup: str | None = None
    options: tuple[str, ...] = ()
    python: str = "python"


# srun hands it to every rank; each start of the job has its own.
_TOKEN = ("export THREEFOLD_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')", "")


def script(config: Config, ranks: Ranks, options: SlurmOptions) -> str:
    """The batch script; ConfigError if a name is not accepted, or an option would not stay on its line."""
    name = checked_name(options.name, longest=64)
    for option in options.options:
        if not option.startswith("--") or "\n" in option:
            what = f"--option {option!r} is not an option of sbatch"
            raise ConfigError(what, expected="one long option", fix="--option=--exclusive")
    folder = shlex.quote(config.log.dir) if config.log.dir is not None else f'"runs/{name}-$SLURM_JOB_ID"'
    text = dump(config, nulls=False)
    end = "END_OF_CONFIG"
    while end in text:
        end += "_"
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from the batch job.
    cpus = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task is not None else ""
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(config, ranks, options)), "", "set -u"]
    if options.setup is not None:
        lines.append(f"source {shlex.quote(options.setup)}")
    lines += [
        f"run={folder}",
        'mkdir -p "$run"',
        f"cat > \"$run/submitted.yaml\" <<'{end}'",
        text.rstrip("\n"),
        end,
        "",
        *(_TOKEN if ranks.num_hosts > 1 else ()),
        f"srun --wait={_WAIT_S}{cpus} {shlex.quote(options.python)} -m threefold train "
        '"$run/submitted.yaml" --log.dir "$run"',
        "code=$?",
    ]
    if options.requeue:
        lines += [
            f"# {EXIT_STOPPED_WITH_CHECKPOINT}: stopped by a signal with a complete checkpoint",
            f'if [ "$code" -eq {EXIT_STOPPED_WITH_CHECKPOINT} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def submit(text: str) -> str:
    """Hands a batch script to sbatch and returns its output; raises as `handed_to`."""
    there = "threefold submit slurm ... --dry-run > job.sh, and there: sbatch job.sh"
    fix = "--dry-run shows the script; sinfo shows partitions, sacctmgr show assoc your accounts"
    return handed_to(
        "sbatch",
        text=text,
        missing=("a host that submits to Slurm, usually a login node", there),
        refused=("options that this cluster accepts", fix),
    )


def _directives(config: Config, ranks: Ranks, options: SlurmOptions) -> list[str]:
    gpus = options.gpus_per_node
    if gpus is None and config.mesh.device != "cpu":
        gpus = ranks.per_host
    ahead = options.signal_ahead_s or config.checkpoint.grace_s + _SAVE_AND_LEAVE_S
    lines = [
        f"--job-name={options.name}",
        f"--nodes={ranks.num_hosts}",
        f"--ntasks-per-node={ranks.per_host}",
        f"--signal=USR1@{ahead}",
        "--requeue" if options.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={options.name}-%j.out",
    ]
    if gpus:
        lines.append(f"--gpus-per-node={gpus}")
    for key in ("time", "partition", "account", "qos", "constraint", "mem", "cpus_per_task"):
        value = getattr(options, key)
        if value is not None:
            lines.append(f"--{key.replace('_', '-')}={_one_word(key, str(value))}")
    return [*lines, *options.options]


def _one_word(key: str, value: str) -> str:
    if value and value.isprintable() and not any(character.isspace() or character in "\"'#" for character in value):
        return value
    option = f"--{key.replace('_', '-')}"
    what, expected = f"{option} {value!r} is not one word", "a value that stays on its #SBATCH line"
    raise ConfigError(what, expected=expected, fix=f"{option} VALUE")
