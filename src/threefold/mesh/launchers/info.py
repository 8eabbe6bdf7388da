"""One process as its launcher describes it, and the checks that every launcher's description must pass. Pure functions.

`Variables` reads numbers from an environment and refuses missing or invalid ones. `readers` has one reader per
launcher.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from threefold.errors import ConfigError

Environ = Mapping[str, str]
# As in torch's own examples; below the ports that a kernel assigns (from 32768).
DEFAULT_PORT = 29500
_FIRST_PORT, _NUM_PORTS = 15000, 14000


@dataclass(frozen=True)
class LaunchInfo:
    """This process as its launcher describes it; without a launcher, the only rank.

    Attributes:
        master_addr, master_port: where rank 0 (or the launcher's agent) can be reached; None in a single process.
        host: the launcher's name for this machine, or "" if it gives none.
        restart: how often this job has been restarted.
        max_restarts: how often the launcher restarts it at most; 0 if it gives no number.
        generation: if the launcher keeps one rendezvous store over its restarts: distinguishes this start's keys from
            earlier ones; else None.
        own_device: the launcher has assigned each rank its own device and hides the others.
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

    environ: Environ
    launcher: str

    def number(self, name: str) -> int | None:
        """A variable's whole number; None if it is not set.

        Raises:
            ConfigError: it is not a number.
        """
        value = self.environ.get(name)
        if value is None:
            return None
        if not is_number(value):
            raise ConfigError(
                f"{name} = {value!r} is not a number",
                expected="a whole number, as a launcher sets it",
                fix=f"unset {name}, or start with {self.launcher}",
            )
        return int(value)

    def require(self, names: Sequence[str], *, fix: str) -> None:
        """Refuses variables that are set only in part.

        Raises:
            ConfigError: some are not set.
        """
        missing = [name for name in names if name not in self.environ]
        if missing:
            present = [name for name in names if name in self.environ]
            raise ConfigError(
                f"{' and '.join(present)} set, but {' and '.join(missing)} not set",
                expected=f"all of {', '.join(names)} (set by {self.launcher}), or none of them",
                fix=fix,
            )

    def needed(self, names: Sequence[str], *, fix: str) -> list[int]:
        """The numbers of variables that must all be set; raises as `require` and `number` do."""
        self.require(names, fix=fix)
        return [self.number(name) or 0 for name in names]

    def port(self) -> int | None:
        """MASTER_PORT; None if it is not set.

        Raises:
            ConfigError: it is not a port.
        """
        port = self.number("MASTER_PORT")
        if port is not None and not 0 < port < 2**16:
            raise ConfigError(
                f"MASTER_PORT = {port} is not a port",
                expected="a number from 1 to 65535",
                fix=f"export MASTER_PORT={DEFAULT_PORT}",
            )
        return port


def is_number(text: str) -> bool:
    """Whether a text is a whole number in ASCII digits."""
    return text.isascii() and text.isdecimal()


def checked(info: LaunchInfo, rank_name: str, world_name: str) -> LaunchInfo:
    """Returns the info if its numbers fit one another.

    Raises:
        ConfigError: a rank outside its world, or local numbers that contradict the global ones.
    """
    if info.rank >= info.world_size:
        what = f"{rank_name} = {info.rank} with {world_name} = {info.world_size}"
        expected = f"0 <= {rank_name} < {world_name}"
    elif info.local_world_size > info.world_size:
        what = f"{info.local_world_size} ranks on this machine, but {world_name} = {info.world_size}"
        expected = "no more ranks on a machine than in the world"
    elif info.local_rank >= info.local_world_size:
        what = f"local rank {info.local_rank} of {info.local_world_size} ranks on this machine"
        expected = "0 <= local rank < ranks on the machine: it is the number of the device that the rank uses"
    else:
        return info
    raise ConfigError(
        what, expected=expected, fix="start with torchrun --nproc_per_node=N -m threefold ..."
    )


def port_of_job(*numbers: int) -> int:
    """A port that is the same for all ranks of a job, and another one for other jobs on the same machine."""
    return (
        _FIRST_PORT
        + functools.reduce(lambda derived, number: derived * 31 + number, numbers, 0)
        % _NUM_PORTS
    )


def first_host(hostlist: str) -> str:
    """The first name of a Slurm host list: `n[07-09,12],login` is n07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hostlist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def tasks_of_node(tasks: str, node: int) -> int | None:
    """Ranks on one node, from Slurm's `2(x3),1`; None if it does not say."""
    counts: list[int] = []
    for part in tasks.split(","):
        if (match := re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)) is None:
            return None
        counts += [int(match[1])] * min(int(match[2] or 1), node + 1)
    return counts[node] if node < len(counts) else None
