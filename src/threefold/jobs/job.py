"""The common parts of every cluster's job: a name, numbers of hosts and ranks that fit the mesh, and no secrets.

The jobs themselves are in `slurm`, `sagemaker` and `kubernetes`: pure functions from a config and options to a text or
a request, so `--dry-run` prints exactly what would be sent.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.config.schema import Config, MeshConfig
from threefold.config.yaml_text import parse
from threefold.errors import ConfigError, Problem, RunError
from threefold.jsonl import Values
from threefold.mesh.topology import Topology, resolve

# Parts of names, between underscores: MY_PASS, OPENAI_KEY, HF_AUTH; not TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRETS?|PASS|PASSWORD|PASSWD|PASSPHRASE|KEY|AUTH|CREDENTIALS?|DSN|(?<=_)PWD)(?![A-Z])",
    re.IGNORECASE,
)
# Forms that services give to their keys, and an address with a password in it.
_SECRET_VALUE = re.compile(
    r"\s*(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|AIza)|.*://[^/\s]*:[^/\s]*@",
    re.S,
)
# As a whole value of a config, in which names and paths may begin like a key: hf_cache/rows.jsonl.
_SECRET_IN_CONFIG = re.compile(
    r"(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|AIza)[A-Za-z0-9_-]{16,}|.*://[^/\s]*:[^/\s]*@.*",
    re.S,
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Ranks:
    """How many ranks run where."""

    topology: Topology
    num_hosts: int
    per_host: int


def ranks_of(mesh: MeshConfig, *, num_hosts: int, per_host: int | None) -> Ranks:
    """A job's ranks, `per_host` or as many as the mesh asks for; ConfigError if it leaves that open or does not fit."""
    if per_host is not None:
        topology, _ = resolve(mesh, launched_world_size=num_hosts * per_host)
        return Ranks(topology, num_hosts, per_host)
    sizes = (mesh.dp, mesh.dp_shard, mesh.cp, mesh.tp)
    if all(size is None for size in sizes) or "auto" in (mesh.dp, mesh.cp, mesh.tp):
        raise ConfigError(
            "the mesh leaves the number of ranks open, but a job must request its hosts' devices",
            expected="mesh.dp, mesh.cp and mesh.tp as numbers, or the ranks on each host",
            fix="--ranks-per-node 8   (or --mesh.dp 8)",
        )
    topology, _ = resolve(mesh)
    if topology.world_size % num_hosts:
        raise ConfigError(
            f"{topology.world_size} ranks ({topology}) cannot be divided equally among {num_hosts} hosts",
            expected="world size = dp x cp x tp, the same number of ranks on every host",
            fix=f"a number of hosts that divides {topology.world_size}, or other mesh sizes",
        )
    return Ranks(topology, num_hosts, topology.world_size // num_hosts)


def checked_name(name: str, *, longest: int, lower: bool = False) -> str:
    """A job's name, a part of host names and folders; ConfigError if it has other characters or is too long."""
    characters = "a-z0-9" if lower else "A-Za-z0-9"
    if re.fullmatch(f"[{characters}]([{characters}-]{{0,{longest - 2}}}[{characters}])?", name):
        return name
    kind = "lower-case letters" if lower else "letters"
    proposed = (
        re.sub(f"[^{characters}]+", "-", name.lower() if lower else name)
        .strip("-")[:longest]
        .strip("-")
    )
    raise ConfigError(
        f"--name {name!r} is not a valid name for this cluster's jobs",
        expected=f"{kind}, digits and single dashes inside, at most {longest} characters",
        fix=f"--name {proposed or 'threefold'}",
    )


def variables(
    entries: Sequence[str] | None, environ: Mapping[str, str], *, secret_fix: str
) -> dict[str, str]:
    """Returns the job's variables from `NAME=VALUE`, or from `NAME` with its value in this environment.

    Raises:
        ConfigError: a name is not a variable's, is not set here, or holds a secret.
    """
    values: dict[str, str] = {}
    problems = []
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        if not _VARIABLE.fullmatch(name):
            problems.append(
                Problem(
                    f"--env {entry!r} does not name a variable",
                    "NAME=VALUE, or NAME to take its value from this environment",
                    "--env NAME=VALUE",
                )
            )
        elif _SECRET_NAME.search(name) or _SECRET_VALUE.match(value or environ.get(name, "")):
            what = f"--env {name} looks like a secret: its value would be kept in the job's description"
            expected = "secrets in the cluster's own store, and only their names in the job"
            problems.append(Problem(what, expected, secret_fix.format(name=name)))
        elif not equals and name not in environ:
            what = f"--env {name}, but {name} is not set here"
            problems.append(Problem(what, "a value to pass on", f"--env {name}=VALUE"))
        else:
            values[name] = value if equals else environ[name]
    ConfigError.raise_for(problems)
    return values


def secrets_in(config: Config) -> list[Problem]:
    """The values of a config that look like secrets: every job's description contains the config as it is."""

    def look(value: Any, key: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for name, entry in value.items():
                yield from look(entry, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list | tuple):
            for number, entry in enumerate(value):
                yield from look(entry, f"{key}[{number}]")
        elif isinstance(value, str) and _SECRET_IN_CONFIG.fullmatch(value.strip()):
            yield key

    expected = "no secret in a config, which the job's description holds: libraries read secrets from variables"
    fix = "leave it out of the config, and set HF_TOKEN, AWS_PROFILE or the like on the cluster"
    keys = look(config.model_dump(mode="json"), "")
    return [Problem(f"the value of {key} looks like a secret", expected, fix) for key in keys]


def named_pairs(
    entries: Sequence[str] | None, option: str, what: str, *, example: str
) -> dict[str, str]:
    """{NAME: rest} of options written as NAME=REST; ConfigError if one has another form."""
    pairs = {}
    for entry in entries or ():
        name, equals, rest = entry.partition("=")
        if not (name and equals and rest):
            raise ConfigError(
                f"{option} {entry!r} is not {what}", expected=what, fix=f"{option} {example}"
            )
        pairs[name] = rest
    return pairs


def with_set(described: Values, texts: Mapping[str, str]) -> Values:
    """A description with the values of `--set PATH=YAML` at the paths that they name; ConfigError if one has none."""
    for path, text in texts.items():
        *outer, name = path.split(".")
        place: Any = described
        for key in outer:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        is_secret = _SECRET_VALUE.match(text) is not None
        if is_secret or not isinstance(place, dict):
            raise ConfigError(
                f"the value of --set {path} looks like a secret"
                if is_secret
                else f"--set {path}: no such field",
                expected="a field of the job, not a secret: --dry-run shows the job without --set",
                fix=f"leave --set {path} out",
            )
        place[name] = parse(text, f"--set {path}")
    return described


def handed_to(
    program: str, *arguments: str, text: str, missing: tuple[str, str], refused: tuple[str, str]
) -> str:
    """Returns the output of a cluster's own program, which gets the job as its input.

    Args:
        missing, refused: the expectation and the fix, if the program is not installed or refuses the job.

    Raises:
        ConfigError: the program is not installed. RunError: it refuses.
    """
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"{program} is not installed here", expected=missing[0], fix=missing[1]
        )
    done = subprocess.run(
        [path, *arguments], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(
            f"{program} did not accept the job: {done.stderr.strip()}",
            expected=refused[0],
            fix=refused[1],
        )
    return done.stdout.strip()
