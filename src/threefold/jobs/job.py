"""What every cluster's job consists of: a name, numbers of hosts and ranks that fit the mesh, and no secrets.

The jobs themselves are in `slurm`, `sagemaker` and `kubernetes`: pure functions from a config and options to a text or
a request, so `--dry-run` prints exactly what would be sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.config.schema import MeshConfig
from threefold.errors import ConfigError, Problem
from threefold.mesh.topology import Topology, resolve

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Ranks:
    """How many ranks run where."""

    topology: Topology
    num_hosts: int
    per_host: int


def ranks_of(mesh: MeshConfig, *, num_hosts: int, per_host: int | None, option: str) -> Ranks:
    """Returns the ranks of a job: `per_host` as given, or as many as the mesh asks for.

    Args:
        option: the option by which a user sets `per_host`.

    Raises:
        ConfigError: the mesh leaves the number of ranks open, or does not fit it.
    """
    if per_host is not None:
        topology, _ = resolve(mesh, launched_world_size=num_hosts * per_host, num_devices=None)
        return Ranks(topology, num_hosts, per_host)
    sizes = (mesh.dp, mesh.dp_shard, mesh.cp, mesh.tp)
    if all(size is None for size in sizes) or "auto" in (mesh.dp, mesh.cp, mesh.tp):
        raise ConfigError(
            "the mesh leaves the number of ranks open, and a job must ask for its hosts' devices",
            expected="mesh.dp, mesh.cp and mesh.tp as numbers, or the ranks on each host",
            fix=f"{option} 8   (or --mesh.dp 8)",
        )
    topology, _ = resolve(mesh, launched_world_size=None, num_devices=None)
    if topology.world_size % num_hosts:
        raise ConfigError(
            f"{topology.world_size} ranks ({topology}) cannot be divided equally among {num_hosts} hosts",
            expected="world size = dp x cp x tp, the same number of ranks on every host",
            fix=f"a number of hosts that divides {topology.world_size}, or other mesh sizes",
        )
    return Ranks(topology, num_hosts, topology.world_size // num_hosts)


def checked_name(name: str, *, longest: int, lower: bool = False) -> str:
    """Returns a job's name if the cluster accepts it; it becomes part of host names and folders.

    Raises:
        ConfigError: the name has other characters, or is too long.
    """
    characters = "a-z0-9" if lower else "A-Za-z0-9"
    if re.fullmatch(f"[{characters}]([{characters}-]{{0,{longest - 2}}}[{characters}])?", name):
        return name
    kind = "small letters" if lower else "letters"
    proposed = re.sub(f"[^{characters}]+", "-", name.lower() if lower else name).strip("-")[:longest].strip("-")
    raise ConfigError(
        f"--name {name!r} is no name for this cluster's jobs",
        expected=f"{kind}, digits and single dashes inside, at most {longest} characters",
        fix=f"--name {proposed or 'threefold'}",
    )


def variables(given: Sequence[str], environ: Mapping[str, str], *, secret_fix: str) -> dict[str, str]:
    """Returns the job's variables from `NAME=VALUE`, or from `NAME` with its value in this environment.

    Raises:
        ConfigError: a name is not a variable's, is not set here, or holds a secret.
    """
    found: dict[str, str] = {}
    problems = []
    for entry in given:
        name, equals, value = entry.partition("=")
        if not _VARIABLE.fullmatch(name):
            problems.append(
                Problem(
                    f"--env {entry!r} names no variable", "NAME=VALUE, or NAME to take it from here", "--env NAME=VALUE"
                )
            )
        elif is_secret(name):
            problems.append(
                Problem(
                    f"--env {name} looks like a secret: its value would be kept in the job's description",
                    "secrets in the cluster's own store, and only their names in the job",
                    secret_fix.format(name=name),
                )
            )
        elif not equals and name not in environ:
            problems.append(
                Problem(f"--env {name}, but {name} is not set here", "a value to pass on", f"--env {name}=VALUE")
            )
        else:
            found[name] = value if equals else environ[name]
    if problems:
        raise ConfigError.of(problems)
    return found


def is_secret(name: str) -> bool:
    """Returns whether a variable's name suggests that its value is a secret."""
    return any(word in name.upper() for word in _SECRET_WORDS)


def named_pairs(given: Sequence[str], *, option: str, what: str, example: str) -> dict[str, str]:
    """Returns {NAME: rest} of options written as NAME=REST.

    Raises:
        ConfigError: an option has another form.
    """
    found = {}
    for entry in given:
        name, equals, rest = entry.partition("=")
        if not (name and equals and rest):
            raise ConfigError(f"{option} {entry!r} is not {what}", expected=what, fix=f"{option} {example}")
        found[name] = rest
    return found


def as_document(*documents: Mapping[str, Any]) -> str:
    """Returns plain mappings as YAML documents."""
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class InLines(SafeRepresenter):
        """Represents multi-line text as lines."""

    def in_lines(representer: Any, text: str) -> Any:
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    InLines.add_representer(str, in_lines)
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = InLines
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    texts = []
    for document in documents:
        buffer = io.StringIO()
        yaml.dump(document, buffer)
        texts.append(buffer.getvalue())
    return "---\n".join(texts)
