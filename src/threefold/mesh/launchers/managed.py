"""Settings and folders that come with a launcher: a managed job's (SageMaker) and accelerate's mesh.

They are layers of the config: a job's hyperparameters count as much as the command line; sizes and folders that a
launcher suggests are defaults, which a config file overrides.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from threefold.config.yaml_text import as_yaml
from threefold.errors import ConfigError, DataError
from threefold.mesh.launchers.info import Environ, is_number

CHANNEL = "channel:"
_FAILURE_CHARACTERS = 1024
_ACCELERATE = {
    axis: f"PARALLELISM_CONFIG_{axis}_SIZE"
    for axis in ("DP_REPLICATE", "DP_SHARD", "CP", "TP", "SP")
}


class Setting(NamedTuple):
    """One key of the config, its value as YAML text, and where that came from."""

    key: str
    text: str
    origin: str


@dataclass(frozen=True)
class Managed:
    """The settings and folders that a managed job gives its program.

    Attributes:
        settings: its hyperparameters, which are keys of the config.
        channels: folders of its data, by the channels' names in lower case.
        checkpoints: folder that survives a restart of the job.
        model: folder of the finished model.
        failure: file whose first 1,024 characters the job's owner sees.
    """

    settings: tuple[Setting, ...]
    channels: Mapping[str, Path] = field(default_factory=dict)
    checkpoints: Path | None = None
    model: Path | None = None
    failure: Path | None = None

    def tell_failure(self, text: str) -> None:
        """Writes the reason to the file that the job's owner sees; the first one counts."""
        if self.failure is None or self.failure.exists():
            return
        with contextlib.suppress(OSError):
            self.failure.parent.mkdir(parents=True, exist_ok=True)
            self.failure.write_text(text[:_FAILURE_CHARACTERS])


def managed(environ: Environ) -> Managed | None:
    """The managed job that this process is a part of; None if there is none.

    SageMaker's toolkit and its SDK's own drivers all set SM_HPS, SM_CHANNEL_*, SM_MODEL_DIR and SM_OUTPUT_DIR; their
    command lines differ. SAGEMAKER_BASE_DIR moves /opt/ml; the checkpoint folder there has no variable.

    Raises:
        ConfigError: SM_HPS is not a JSON mapping.
    """
    if "SM_HPS" not in environ:
        return None
    try:
        hyperparameters = json.loads(environ["SM_HPS"])
    except ValueError:
        hyperparameters = None
    if not isinstance(hyperparameters, dict):
        raise ConfigError(
            f"SM_HPS = {environ['SM_HPS'][:60]!r} is not a JSON mapping",
            expected='the hyperparameters as SageMaker sets them: {"train.steps": 100}',
            fix="unset SM_HPS, or give it as JSON",
        )
    base = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    output = Path(environ.get("SM_OUTPUT_DIR", base / "output"))
    channel = "SM_CHANNEL_"
    # Text is YAML, as on the command line. The drivers of the SDK turn names into shell variables, which cannot contain
    # a dot: train__steps is train.steps.
    settings = [
        Setting(
            key.replace("__", "."),
            value if isinstance(value, str) else as_yaml(value),
            f"hyperparameter {key}",
        )
        for key, value in hyperparameters.items()
        if not key.startswith("sagemaker_")
    ]
    return Managed(
        tuple(settings),
        {
            name.removeprefix(channel).lower(): Path(environ[name])
            for name in environ
            if name.startswith(channel)
        },
        base / "checkpoints",
        Path(environ["SM_MODEL_DIR"]) if "SM_MODEL_DIR" in environ else None,
        Path(environ.get("SM_OUTPUT_FAILURE", output / "failure")),
    )


def defaults(environ: Environ) -> tuple[Setting, ...]:
    """The launcher's suggestions for keys that the config leaves open.

    Raises:
        ConfigError: sizes that are not numbers or contradict DP_SIZE, CP_SIZE or TP_SIZE.
    """
    settings = _accelerate_sizes(environ)
    job = managed(environ)
    if job is not None and job.checkpoints is not None:
        settings.append(
            Setting("log.dir", as_yaml(str(job.checkpoints)), "SageMaker's checkpoint folder")
        )
    return tuple(settings)


def _accelerate_sizes(environ: Environ) -> list[Setting]:
    """accelerate's mesh: dp = dp_replicate x dp_shard. Its sizes are all 1 if none was given."""
    sizes = {}
    for axis, name in _ACCELERATE.items():
        text = environ.get(name, "1")
        if not (is_number(text) and int(text) > 0):
            raise ConfigError(
                f"{name} = {text!r} is not accepted",
                expected="a whole number greater than 0, as accelerate launch sets it",
                fix=f"unset {name}, and set the mesh with --mesh.dp, --mesh.cp and --mesh.tp",
            )
        sizes[axis] = int(text)
    if all(size == 1 for size in sizes.values()):
        return []
    if sizes["SP"] > 1:
        raise ConfigError(
            f"{_ACCELERATE['SP']} = {sizes['SP']}",
            expected="no such axis: Threefold splits sequences over mesh.cp, by Ulysses too",
            fix=f"--parallelism_config_cp_size {sizes['SP']} instead of sp, and --mesh.cp_method ulysses",
        )
    sizes["DP"] = sizes["DP_REPLICATE"] * sizes["DP_SHARD"]
    for axis in ("DP", "CP", "TP"):
        own = environ.get(f"{axis}_SIZE")
        if own is not None and own != str(sizes[axis]):
            raise ConfigError(
                f"{axis}_SIZE = {own}, but accelerate's PARALLELISM_CONFIG_ sizes give {axis.lower()} = {sizes[axis]}",
                expected="the same size in both",
                fix=f"unset {axis}_SIZE, or --mesh.{axis.lower()} {own}   (overrides both; set the other axes too)",
            )
    keys = {"mesh.dp": "DP", "mesh.dp_shard": "DP_SHARD", "mesh.cp": "CP", "mesh.tp": "TP"}
    return [Setting(key, str(sizes[axis]), "accelerate launch") for key, axis in keys.items()]


def data_path(source: str, environ: Environ) -> str:
    """The folder of `channel:NAME`.

    Raises:
        DataError: the job has no such channel.
    """
    name = source.removeprefix(CHANNEL)
    job = managed(environ)
    channels = job.channels if job is not None else {}
    # SageMaker's variables have the names in upper case.
    if (folder := channels.get(name.lower())) is not None:
        return str(folder)
    raise DataError(
        f"data.source = {source!r}, but this process has no such channel",
        expected=f"one of {', '.join(CHANNEL + each for each in sorted(channels))}"
        if channels
        else "a SageMaker job, which sets SM_HPS and SM_CHANNEL_NAME for each channel",
        fix=f"threefold submit sagemaker ... --channel {name}=s3://BUCKET/PREFIX, or a folder as --data.source",
    )
