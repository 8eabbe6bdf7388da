"""What a launcher says about one process, and the checks that every launcher's answer must pass: arithmetic and text.

`Variables` reads numbers out of an environment and says in three parts which one is missing or none. The readers of the
single launchers are in `readers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from threefold.errors import ConfigError, Problem

# What torch's own examples use; below the ports that a kernel hands out by itself (from 32768).
DEFAULT_PORT = 29500
_FIRST_PORT, _NUM_PORTS = 15000, 14000


@dataclass(frozen=True)
class LaunchInfo:
    """This process as its launcher describes it; one rank of one where there is no launcher.

    Attributes:
        master_addr, master_port: where rank 0 (or the launcher's agent) can be reached; None in a single process.
        host: the launcher's name of this machine, or "" where it gives none.
        restart: how often this job has been started again.
        max_restarts: how often the launcher will do so; 0 where it does not say.
        generation: where the launcher keeps one rendezvous store over its restarts: what tells this start's keys from
            those before; else None.
        own_device: the launcher has given each rank a device of its own and hides the others.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str | None = None
    host: str = ""
    restart: int = 0
    max_restarts: int = 0
    generation: str | None = None
    own_device: bool = False


@dataclass(frozen=True)
class Variables:
    """An environment, read as a launcher of the given name has set it."""

    environ: Mapping[str, str]
    launcher: str

    def number(self, name: str) -> int | None:
        """A variable's whole number; None where it is not set.

        Raises:
            ConfigError: it is something else.
        """
        value = self.environ.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal()):
            raise ConfigError(
                f"{name} = {value!r} is not a number",
                expected="the whole number that a launcher sets",
                fix=f"unset {name}, or start with {self.launcher}",
            )
        return int(value)

    def needed(self, names: Iterable[str], *, fix: str) -> list[int]:
        """The numbers of variables of which one is set, so that all must be.

        Raises:
            ConfigError: some are not set.
        """
        names = list(names)
        missing = [name for name in names if name not in self.environ]
        if missing:
            present = [name for name in names if name in self.environ]
            raise ConfigError(
                f"{' and '.join(present)} set, but {' and '.join(missing)} not",
                expected=f"all of {', '.join(names)} (set by {self.launcher}), or none of them",
                fix=fix,
            )
        return [self.number(name) or 0 for name in names]


def checked(info: LaunchInfo, *, rank_name: str, world_name: str) -> LaunchInfo:
    """The same, when its numbers fit one another.

    Raises:
        ConfigError: a rank outside of its world, or local numbers that contradict the global ones.
    """
    fix = "start with torchrun --nproc_per_node=N -m threefold ..."
    problems = []
    if info.rank >= info.world_size:
        problems.append(
            Problem(
                f"{rank_name} = {info.rank} with {world_name} = {info.world_size}",
                f"0 <= {rank_name} < {world_name}",
                fix,
            )
        )
    elif info.local_world_size > info.world_size:
        problems.append(
            Problem(
                f"{info.local_world_size} ranks on this machine, but {world_name} = {info.world_size}",
                "no more ranks on a machine than in the world",
                fix,
            )
        )
    elif info.local_rank >= info.local_world_size:
        problems.append(
            Problem(
                f"local rank {info.local_rank} of {info.local_world_size} ranks on this machine",
                "0 <= local rank < ranks on the machine: it is the number of the device that the rank takes",
                fix,
            )
        )
    if problems:
        raise ConfigError.of(problems)
    return info


def port_of_job(*numbers: int) -> int:
    """A port that all ranks of a job derive alike, and another job on the same machine derives otherwise."""
    derived = 0
    for number in numbers:
        derived = derived * 31 + number
    return _FIRST_PORT + derived % _NUM_PORTS


def first_host(hostlist: str) -> str:
    """The first name of a Slurm host list: `n[07-09,12],login` is n07."""
    name, rest = "", hostlist
    while rest and not rest.startswith(","):
        if rest.startswith("["):
            inside, _, rest = rest[1:].partition("]")
            name += inside.partition(",")[0].partition("-")[0]
        else:
            name, rest = name + rest[0], rest[1:]
    return name


def tasks_of_node(tasks: str, node: int) -> int | None:
    """Ranks on one node out of Slurm's `2(x3),1`; None where it does not say."""
    counts: list[int] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        repeated = times.removesuffix(")") or "1"
        if not (count.isascii() and count.isdecimal() and repeated.isascii() and repeated.isdecimal()):
            return None
        counts += [int(count)] * min(int(repeated), node + 1)
    return counts[node] if node < len(counts) else None
