"""The kinds of jobs that `threefold submit` makes. A module of a kind has what `JobKind` names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.jobs.job import Ranks

# Name of the command -> its module. To add one: a module, and a row here.
CLUSTERS: Mapping[str, str] = {
    "slurm": "threefold.jobs.slurm",
    "sagemaker": "threefold.jobs.sagemaker",
    "kubernetes": "threefold.jobs.kubernetes",
}


@dataclass(frozen=True)
class Job:
    """The training of any kind of job; `keys`: those given on the command line, as text."""

    config: Config
    ranks: Ranks
    keys: Mapping[str, str]


class JobKind(Protocol):
    """A module of this folder.

    Its `Settings` are the options, its docstring's first line the help of its command, `EXAMPLE` follows the name and
    the config in an example.
    """

    Settings: type[Any]
    EXAMPLE: str

    def problems(self, config: Config, ranks: Ranks, settings: Any) -> Iterable[Problem]:
        """Yields what would make the job fail or lose its work."""

    def text(self, job: Any, settings: Any) -> str:
        """The output of `--dry-run`: all that would be sent, without values that may be private."""

    def send(self, job: Any, settings: Any) -> str:
        """Submits the job and returns the cluster's answer."""


def kind_of(name: str) -> JobKind:
    """The module of a name of `CLUSTERS`."""
    return cast(JobKind, import_module(CLUSTERS[name]))
