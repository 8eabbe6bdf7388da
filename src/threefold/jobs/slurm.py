"""A Slurm job: an sbatch script that starts ranks with srun, saves before the time limit and requeues itself.

srun starts one rank per task; `mesh.launchers` finds rank, world size and master in srun's own variables. Before the
time limit, Slurm sends SIGUSR1 to the ranks, which save and exit with code 75. The script then puts the job back into
the queue, and the next start resumes in the same folder. Secrets (HF_TOKEN, WANDB_API_KEY) reach the job through the
environment, which sbatch passes on. After a crash it submits itself once more, as a job that excludes the node whose
rank ended first: Slurm lets only a new job do so. The script contains the config, so editing the file later changes
nothing.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.config.schema import Config, MeshConfig
from threefold.config.yaml_text import dump
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, ConfigError, Problem
from threefold.jobs.clusters import Job
from threefold.jobs.job import Ranks, checked_name, handed_to, ranks_of
from threefold.jobs.settings import setting

# srun's limit for the other ranks after the first has ended: a dead rank must not leave the others waiting.
_WAIT_S = 120
_SAVE_AND_LEAVE_S = 60
# Slurm may send a signal up to a minute earlier than it was asked to.
_SIGNAL_EARLY_S = 60
_NO_LIMIT = {"infinite", "unlimited", "-1", "0"}
# Exit codes of ranks that another start would not mend: done, and a config that is refused.
_FINAL = "0 2"
# What apptainer opens by itself; any other name of an image is pyxis'.
_APPTAINER = re.compile(r".*\.sif|(docker|oras|library|docker-archive)://.*")


EXAMPLE = "--nodes 1 --time 12:00:00"


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of a Slurm job, outside the config. None: left to the cluster."""

    name: str = setting("the job's name", "threefold")
    time: str | None = setting("time limit in sbatch's form: 12:00:00")
    partition: str | None = setting("partition")
    account: str | None = setting("account")
    qos: str | None = setting("quality of service")
    constraint: str | None = setting("features of the hosts")
    mem: str | None = setting("memory of each host: 64G")
    cpus_per_task: int | None = setting("cores of each rank", least=1)
    gpus_per_node: int | None = setting("default: one per rank, none with mesh.device: cpu")
    signal_ahead_s: int | None = setting(
        "time before the limit at which ranks save, s; default: grace_s + 60",
        option="signal-ahead",
        least=1,
    )
    requeue: bool = setting("requeue after a stop that saved", True)
    setup: str | None = setting(
        "shell file to source first: modules, an environment", form="FILE"
    )
    options: tuple[str, ...] = setting(
        "another sbatch option: --option=--exclusive", (), option="option"
    )
    srun_options: tuple[str, ...] = setting(
        "an srun option: --srun-option=--mpi=pmix", (), option="srun-option"
    )
    container: str | None = setting(
        "image with threefold: a .sif file or docker://... (apptainer), else for pyxis"
    )
    retries: int = setting(
        "resubmissions after a crash, each without the node that failed first", 0
    )
    python: str = setting(
        "interpreter with threefold on the hosts; default: this one, a container's python", ""
    )


Settings = SlurmSettings


def problems(config: Config, ranks: Ranks, options: SlurmSettings) -> Iterator[Problem]:
    """Yields what would make the job fail, or requeue itself forever."""
    for option, values in (
        ("--option", options.options),
        ("--srun-option", options.srun_options),
    ):
        for each in values:
            if not each.startswith("--") or "\n" in each:
                program = "sbatch" if option == "--option" else "srun"
                yield Problem(
                    f"{option} {each!r} is not an option of {program}",
                    "one long option",
                    f"{option}=--exclusive",
                )
    if options.time is not None and options.time.lower() not in _NO_LIMIT:
        limit = _seconds(options.time)
        ahead = _ahead_s(config, options)
        if limit is None:
            yield Problem(
                f"--time {options.time!r} is not a Slurm time",
                "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
                "--time 12:00:00",
            )
        elif limit <= (least := ahead + _SIGNAL_EARLY_S):
            minutes = -(-2 * least // 60)
            yield Problem(
                f"--time {options.time}: ranks are told to save {ahead} s before it ends, as soon as they start",
                f"more than {least} s (--signal-ahead {ahead}, which Slurm may send a "
                "minute early), and time to train",
                f"--time {minutes // 60:02}:{minutes % 60:02}:00",
            )


def missing_setup(options: SlurmSettings) -> Iterator[Problem]:
    """Yields that --setup names no file on this host."""
    if options.setup is not None and not Path(options.setup).is_file():
        yield Problem(
            f"--setup {options.setup} is not a file here",
            "a shell file that the job sources first",
            "--setup FILE   (or leave it out; --dry-run prints the script for another host)",
        )


def _ahead_s(config: Config, options: SlurmSettings) -> int:
    return options.signal_ahead_s or config.checkpoint.grace_s + _SAVE_AND_LEAVE_S


def _seconds(text: str) -> int | None:
    """A time limit in Slurm's forms; None if it has none of them."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    first, second, third = (int(part) if part is not None else None for part in parts)
    assert first is not None
    if days is not None:
        return ((int(days) * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if second is None:
        return first * 60
    return first * 60 + second if third is None else (first * 60 + second) * 60 + third


# srun passes it to every rank; each start of the job has its own.
_TOKEN = ("export THREEFOLD_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')", "")


def script(config: Config, ranks: Ranks, options: SlurmSettings) -> str:
    """The batch script; ConfigError if a name is not accepted, or an option would not stay on its line."""
    name = checked_name(options.name, longest=64)
    folder = (
        shlex.quote(config.log.dir)
        if config.log.dir is not None
        else f'"runs/{name}-$SLURM_JOB_ID"'
    )
    if options.retries and config.log.dir is None:
        folder = f'"${{THREEFOLD_RUN:-runs/{name}-$SLURM_JOB_ID}}"'
    lines = [
        *_beginning(_directives(config, ranks, options), options),
        f"run={folder}",
        'mkdir -p "$run"',
        *_with_config('cat > "$run/submitted.yaml"', config),
        "",
        *(_TOKEN if ranks.num_hosts > 1 else ()),
        _start(options, "train", '"$run/submitted.yaml"', "--log.dir", '"$run"'),
        "code=$?",
    ]
    if options.requeue:
        lines += [
            f"# {EXIT_STOPPED_WITH_CHECKPOINT}: stopped by a signal with a complete checkpoint",
            f'if [ "$code" -eq {EXIT_STOPPED_WITH_CHECKPOINT} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
            "fi",
        ]
    if options.retries:
        lines += _again(options.retries)
    return "\n".join([*lines, 'exit "$code"', ""])


def _beginning(directives: Iterable[str], options: SlurmSettings) -> list[str]:
    """The first lines of a script: what sbatch reads, and the user's own set-up."""
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), ""]
    if options.setup is not None:
        setup, missing = (
            shlex.quote(options.setup),
            shlex.quote(f"--setup {options.setup} cannot be read here"),
        )
        # Before `set -u`: files of modules and environments use variables that are not set.
        lines += [f"[ -r {setup} ] || {{ echo {missing} >&2; exit 1; }}", f"source {setup}"]
    return [*lines, "set -u"]


def _with_config(command: str, config: Config) -> list[str]:
    """The lines of a command that reads the config from its standard input."""
    document = dump(config, nulls=False)
    end = "END_OF_CONFIG"
    while end in document:
        end += "_"
    return [f"{command} <<'{end}'", document.rstrip("\n"), end]


def _start(options: SlurmSettings, *arguments: str) -> str:
    """The command that starts threefold in each task; `$run` is seen in a container too."""
    words = ["srun", f"--wait={_WAIT_S}"]
    if options.cpus_per_task is not None:
        # Since Slurm 22.05, srun does not inherit --cpus-per-task from the batch job.
        words.append(f"--cpus-per-task={options.cpus_per_task}")
    words += [shlex.quote(option) for option in options.srun_options]
    if options.container is not None:
        image = shlex.quote(options.container)
        folders = '"$PWD:$PWD,$(realpath "$run"):$(realpath "$run")"'
        if _APPTAINER.fullmatch(options.container):
            words += ["apptainer", "exec", "--nv", "--bind", folders, "--pwd", '"$PWD"', image]
        else:
            words += [
                f"--container-image={image}",
                f"--container-mounts={folders}",
                '--container-workdir="$PWD"',
            ]
    python = options.python or (sys.executable if options.container is None else "python")
    kept = [f'2> >(tee "$run/{_SRUN_ERRORS}" >&2)'] if options.retries else []
    return " ".join([*words, shlex.quote(python), "-m", "threefold", *arguments, *kept])


# What srun reports about ranks that end: `srun: error: NODE: task 3: Exited with exit code 1`.
_SRUN_ERRORS = "srun.err"


def _again(retries: int) -> list[str]:
    """Lines that submit the job once more after a crash, without the node whose rank ended first according to srun."""
    first = f'grep -m 1 "^srun: error: .*: task" "$run/{_SRUN_ERRORS}"'
    return [
        f'if [ "${{THREEFOLD_RETRY:=0}}" -lt {retries} ] && ! grep -qw -- "$code" <<< "{_FINAL}"; then',
        "    sleep 1  # what srun said is on its way to the file",
        f"    bad=$({first} | sed -n 's/^srun: error: \\([^][, :]*\\): task .*/\\1/p')",
        "    out=$(scontrol show job \"$SLURM_JOB_ID\" | sed -n 's/.*ExcNodeList=\\([^ ]*\\).*/\\1/p' | grep -v null)",
        '    without="$out${out:+${bad:+,}}$bad"',
        '    export THREEFOLD_RETRY=$((THREEFOLD_RETRY + 1)) THREEFOLD_RUN="$run"',
        "    unset SLURM_RESTART_COUNT",
        '    cp "$0" "$run/job.sh" && sbatch --export=ALL ${without:+--exclude="$without"} "$run/job.sh" &&',
        f'        echo "retry $THREEFOLD_RETRY of {retries}${{bad:+, without $bad}}"',
        "fi",
    ]


def text(job: Job, options: SlurmSettings) -> str:
    """The batch script."""
    return script(job.config, job.ranks, options).rstrip("\n")


def send(job: Job, options: SlurmSettings) -> str:
    """Passes the batch script to sbatch and returns its output; raises like `handed_to`, and if a file is missing."""
    by_hand = "threefold submit slurm ... --dry-run > job.sh, and there: sbatch job.sh"
    return _sent(script(job.config, job.ranks, options), options, by_hand)


def _sent(text: str, options: SlurmSettings, by_hand: str, *arguments: str) -> str:
    """The answer of sbatch; `by_hand`: what to do on a host that has none."""
    ConfigError.raise_for(missing_setup(options))
    fix = (
        "--dry-run shows the script; sinfo shows partitions, sacctmgr show assoc your accounts"
    )
    return handed_to(
        "sbatch",
        *arguments,
        text=text,
        missing=("a host that submits to Slurm, usually a login node", by_hand),
        refused=(
            "options that this cluster accepts",
            fix if not arguments else fix.partition("; ")[2],
        ),
    )


def preparation(
    config: Config, options: SlurmSettings, to: str, *, num_tasks: int, workers: int | None
) -> str:
    """The script of an array that makes the parts of a token store, and of the job after it, which joins them.

    Raises:
        ConfigError: an option is not accepted, or has no effect on a preparation.
    """
    checked_name(options.name, longest=64)
    one = ranks_of(MeshConfig(dp=1), num_hosts=1, per_host=1)
    if options.retries or options.signal_ahead_s or options.gpus_per_node:
        raise ConfigError(
            "--retries, --signal-ahead and --gpus-per-node have no effect on a preparation",
            expected="tasks on a CPU, which are started again by Slurm",
            fix="leave them out",
        )
    ConfigError.raise_for(problems(config, one, options))
    directives = _directives(config, one, options)
    words = ("data", "prepare", "/dev/stdin", "--to", shlex.quote(to), "--task", '"$task"')
    command = _start(
        options, *words, "--workers", str(workers or '"${SLURM_CPUS_PER_TASK:-1}"')
    )
    lines = [
        *_beginning(
            (line for line in directives if not line.startswith(("--signal", "--gpus"))),
            options,
        ),
        f"run={shlex.quote('.' if '://' in to else to)}",
        "task=join",
        f'[ -z "${{SLURM_ARRAY_TASK_ID:-}}" ] || task="$SLURM_ARRAY_TASK_ID/{num_tasks}"',
        *_with_config(command, config),
    ]
    return "\n".join([*lines, ""])


def send_preparation(text: str, options: SlurmSettings, tasks: Sequence[int]) -> str:
    """Submits an array of these tasks and the job that joins however they end; returns which. Raises like `send`."""
    by_hand = "on any hosts: threefold data prepare ... --task I/N, with I from 0 to N - 1; then: --task join"
    after, summary = [], ""
    if tasks:
        array = f"--array={','.join(map(str, tasks))}"
        number = _sent(text, options, by_hand, "--parsable", array).partition(";")[0]
        after = [f"--dependency=afterany:{number}"]
        summary = f"job {number} makes parts in {len(tasks)} tasks; "
    number = _sent(text, options, by_hand, "--parsable", *after).partition(";")[0]
    return f"{summary}job {number} joins and proves them: {options.name}-{number}.out"


def _directives(config: Config, ranks: Ranks, options: SlurmSettings) -> list[str]:
    gpus = options.gpus_per_node
    if gpus is None and config.mesh.device != "cpu":
        gpus = ranks.per_host
    lines = [
        f"--job-name={options.name}",
        f"--nodes={ranks.num_hosts}",
        f"--ntasks-per-node={ranks.per_host}",
        f"--signal=USR1@{_ahead_s(config, options)}",
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
    if (
        value
        and value.isprintable()
        and not any(character.isspace() or character in "\"'#" for character in value)
    ):
        return value
    option = f"--{key.replace('_', '-')}"
    what, expected = (
        f"{option} {value!r} is not one word",
        "a value that stays on its #SBATCH line",
    )
    raise ConfigError(what, expected=expected, fix=f"{option} VALUE")
