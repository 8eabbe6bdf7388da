"""How many local ranks this machine has room for: a typo in a mesh size must not bring the machine down."""

from dataclasses import dataclass
from pathlib import Path

from threefold.errors import ConfigError, size_text
from threefold.mesh.environment import num_cores

# The default mesh runs on any machine.
ALWAYS = 8
# Ranks of a core take turns, and a collective waits for the last one: beyond this a step mostly waits.
RANKS_PER_CORE = 8
# Measured on a rank of a model of a million parameters: 63 MiB private, beside the memory shared with the others.
BYTES_PER_RANK = 128 * 2**20


@dataclass(frozen=True)
class Room:
    """Cores that this process may use, and memory that is free; None where it cannot be known."""

    num_cores: int
    free_bytes: int | None

    @property
    def num_ranks(self) -> int:
        """The largest number of local ranks that needs no --force."""
        bounds = [self.num_cores * RANKS_PER_CORE]
        if self.free_bytes is not None:
            bounds.append(self.free_bytes // BYTES_PER_RANK)
        return max(ALWAYS, min(bounds))

    def __str__(self) -> str:
        memory = (
            f" and {size_text(self.free_bytes)} of free memory"
            if self.free_bytes is not None
            else ""
        )
        return f"{self.num_cores} core{'s' if self.num_cores > 1 else ''}{memory}"


def room_here() -> Room:
    """This machine's room, or its container's if that has less."""
    limits = [_available(), *(_left(*files) for files in _LIMITS)]
    return Room(num_cores(), min((each for each in limits if each is not None), default=None))


def refuse_too_many(num_ranks: int, room: Room) -> None:
    """ConfigError if a machine has no room for that many local ranks."""
    if num_ranks > room.num_ranks:
        raise ConfigError(
            f"mesh.dp x mesh.cp x mesh.tp = {num_ranks}, but this machine has room for {room.num_ranks} ranks: {room}",
            expected=f"at most {RANKS_PER_CORE} ranks for each core, and {size_text(BYTES_PER_RANK)} of memory for "
            "each rank besides its part of the model",
            fix="smaller sizes, as --mesh.dp 2 --mesh.cp 2 --mesh.tp 2, or torchrun on several machines   "
            "(--force starts them here)",
        )


def refuse_too_many_workers(num_workers: int, num_ranks: int, room: Room) -> None:
    """ConfigError if a machine has no room for that many loader processes; `num_workers`: of each of its ranks."""
    if num_workers * num_ranks > room.num_ranks:
        most = room.num_ranks // num_ranks
        raise ConfigError(
            f"data.num_workers = {num_workers} x {num_ranks} rank{'s' if num_ranks > 1 else ''} are "
            f"{num_workers * num_ranks:,} processes, but this machine has room for {room.num_ranks}: {room}",
            expected="workers that have a core and memory of their own: more only take those of the ranks",
            fix=f"--data.num_workers {min(most, 4)}   (--force starts them all)",
        )


# (limit, use) of a container, in the two forms of control groups.
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")),
        None,
    )


def _left(limit: str, use: str) -> int | None:
    try:
        return max(0, int(Path(limit).read_text()) - int(Path(use).read_text()))
    except (OSError, ValueError):  # none, or `max`
        return None
