"""`threefold train` and `threefold.train`: run as a rank if a launcher started this process, else start ranks."""

import atexit
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lock import Words
from threefold.config import loading
from threefold.config.loading import LoadedConfig
from threefold.config.paths import (
    METRICS,
    expanded,
    is_task_file,
    refuse_wrong_model,
    source_names,
    task_text,
)
from threefold.config.schema import Config, DataConfig, value_at
from threefold.errors import (
    EXIT_STOPPED_WITH_CHECKPOINT,
    EXIT_WRONG_REQUEST,
    ConfigError,
    Problem,
    RunError,
    error_of,
)
from threefold.jsonl import Lines, Metrics, Values
from threefold.mesh import environment, local_ranks
from threefold.mesh.divisibility import batch_problems, refuse_impossible
from threefold.mesh.local_ranks import ignore
from threefold.mesh.topology import DEFAULT_ON_CPU, Topology, resolve
from threefold.run import resume_choice
from threefold.run.folder import checked_path, new_path
from threefold.run.local_rank_limit import refuse_too_many, refuse_too_many_workers, room_here
from threefold.run.user_objects import (
    PLACES,
    UserObjects,
    callbacks_of,
    check,
    place_of,
    refuse_unsendable,
    with_rows,
)

# What every rank imports; the server that forks the ranks imports it in advance.
PRELOAD = (
    "threefold.__main__",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.distributed.tensor_parallel",
    "threefold.run.rank",
)


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        exit_code: 0 done, 1 failed, 2 wrong request, 75 stopped by a signal with a checkpoint saved.
        folder: the run's folder; None under a launcher, if log.dir was not given.
    """

    exit_code: int
    folder: Path | None

    @property
    def metrics(self) -> Metrics:
        """The metrics logged for the run's last step; empty if the run's folder is unknown."""
        lines = Lines(self.folder / METRICS).read() if self.folder else []
        return next((line.values for line in reversed(lines) if "loss" in line.values), {})

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        newest = CheckpointFolder(self.folder).newest() if self.folder else None
        return newest.path if newest else None


def train(
    config: Config | Values | str | Path | None = None,
    *,
    accept_changes: bool = False,
    dataset: Any = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    loss: Callable[..., Any] | None = None,
    loss_on: Literal["logits", "hidden_states"] = "logits",
    optimizer: Callable[[Any], Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> Result:
    """Trains like `threefold train`: as a rank if a launcher started this process, else on ranks started here.

    Ranks started here import objects by name: pass functions and classes of a module, not of the script itself.
    Under a launcher every process calls this with its own objects and the same rows.

    Args:
        config: a Config, nested plain values, the path of a YAML file, or None for the embedded default.
        accept_changes: resume although keys that affect training have changed, as `--accept-changes`.
        dataset: replaces data.source: a datasets.Dataset or a list of dicts, with the same columns as files of a
            source, or `input_ids` and optionally unshifted `labels`.
        eval_dataset: replaces eval.source, in the same form.
        tokenizer: replaces data.tokenizer: a transformers tokenizer.
        loss: as for `threefold.TrainStep`: (outputs, batch) -> (sum, count), in training and evaluation.
        loss_on: input of the loss: logits, or hidden states before the head.
        optimizer: a function that takes the `threefold.Model` and returns a torch optimizer; the learning rates of
            its groups are peaks, which optimizer.schedule scales.
        callbacks: objects with any of on_step, on_eval, on_save and on_stop, which rank 0 calls with `Facts`; on_step
            and on_eval stop the run by returning True.

    Raises:
        ConfigError: the config is wrong; all errors are reported at once. ThreefoldError: raised by a rank.
        RunError: a rank failed in any other way, or was killed.
    """
    rows = {"dataset": dataset, "eval_dataset": eval_dataset, "tokenizer": tokenizer}
    handed = {name: value for name, value in rows.items() if value is not None}
    loaded = _loaded(config, handed)
    user_objects = UserObjects(loss, loss_on, optimizer, callbacks_of(callbacks))
    config = with_rows(loaded.config, handed)
    check(user_objects, config)
    if config.log.dir is None and environment.current().launcher is None:
        config = _in_new_folder(config)
    with tempfile.TemporaryDirectory() as folder:
        reason = Path(folder) / "reason"
        code = train_command(
            replace(
                loaded,
                config=config,
                accept_changes=accept_changes,
                user_objects=user_objects,
                reason=str(reason),
            )
        )
        if code in (0, EXIT_STOPPED_WITH_CHECKPOINT):
            return Result(code, Path(config.log.dir) if config.log.dir is not None else None)
        if reason.exists():
            raise error_of(json.loads(reason.read_text()), "training")
    raise (ConfigError if code == EXIT_WRONG_REQUEST else RunError)(
        f"training ended with exit code {code}, and no rank reported why",
        expected="exit code 0, or 75 after a stop signal",
        fix="see the ranks' output, and logs/ in the run's folder",
    )


def _in_new_folder(config: Config) -> Config:
    return config.changed(log={"dir": str(new_path())})


def _loaded(config: Config | Values | str | Path | None, handed: Iterable[str]) -> LoadedConfig:
    """The config, with placeholders for objects that were passed in and that it does not name."""
    places = {PLACES[name]: place_of(name) for name in handed}
    if isinstance(config, Config):
        free = {
            key: place
            for key, place in places.items()
            if value_at(config, key) == value_at(Config(), key)
        }
        values = config.model_dump(exclude_unset=True)
        return LoadedConfig(loading.validate(_with_places(values, free)) if free else config)
    if isinstance(config, Mapping):
        return LoadedConfig(loading.validate(_with_places(config, places)))
    defaults = [(key, place, "threefold.train") for key, place in places.items()]
    path = str(config) if config is not None else None
    variables = environment.variables()
    return loading.load(path, environ=variables, defaults=[*defaults, *environment.defaults()])


def _with_places(values: Values, places: Mapping[str, str]) -> Values:
    merged = dict(values)
    for key, place in places.items():
        section, _, name = key.partition(".")
        settings = merged.get(section) or {}
        if isinstance(settings, Mapping):
            merged[section] = {name: place, **settings}
    return merged


def train_command(loaded: LoadedConfig, *, max_restarts: int = 0, force: bool = False) -> int:
    """Trains and returns the exit code; errors that users can fix are raised or, on ranks, printed once.

    Args:
        max_restarts: how often to restart the ranks that this process started, if one of them fails.
        force: start more ranks here than the machine has room for.
    """
    info = environment.current()
    if loaded.last:
        atexit.register(ignore)
    if info.launcher is not None:
        _refuse_unrestartable(loaded.config, info, max_restarts)
        if force:
            raise ConfigError(
                "--force, but a launcher started this rank",
                expected="an option for ranks that are started here",
                fix="leave --force out",
            )
        if info.launcher == "torchrun":
            local_ranks.die_with_parent()
        environment.settle_rank(info)
        code = _run_rank(
            loaded, *resolve(loaded.config.mesh, launched_world_size=info.world_size)
        )
        return code if code or info.rank else deliver(loaded.config)
    _refuse_missing(loaded.config)
    mesh = loaded.config.mesh
    sizes = {mesh.dp, mesh.dp_shard, mesh.cp, mesh.tp} - {None}
    if sizes and "auto" not in sizes:
        refuse_impossible(loaded.config, resolve(mesh)[0])
    if sizes != {1}:
        # While the ranks' server imports, this process inspects the machine.
        local_ranks.preload(PRELOAD)
    topology, why = topology_of_run(loaded.config, force=force)
    refuse_impossible(loaded.config, topology)
    if loaded.config.data != DataConfig(source=loaded.config.data.source):
        from threefold.run.sources import refuse_labels_without_effect

        refuse_labels_without_effect(loaded.config, here=True)
    if topology.world_size == 1 and not max_restarts:
        return _run_rank(loaded, topology, why) or deliver(loaded.config)
    from threefold.run.sources import formats_of, refuse_other_rows, tokenizer_of

    refuse_other_rows(formats_of(loaded.config, here=True), loaded.config.train.objective)
    if loaded.config.data.tokenizer:
        tokenizer_of(loaded.config)
    if loaded.user_objects is not None:
        refuse_unsendable(loaded.user_objects, topology.world_size)
    # Restarted ranks must find the run, and so must this process.
    if loaded.config.log.dir is None:
        loaded = replace(loaded, config=_in_new_folder(loaded.config))
    from threefold.run.watch.pulse import Witness

    witness = Witness(Path(str(loaded.config.log.dir)), topology.world_size)
    code = local_ranks.start_ranks(
        _rank_entry,
        (replace(loaded, pulses=witness.pulses), topology, why),
        num_ranks=topology.world_size,
        grace_s=loaded.config.checkpoint.grace_s,
        max_restarts=max_restarts,
        last=loaded.last,
        ended=witness.ended,
    )
    return code or deliver(loaded.config)


def _refuse_missing(config: Config) -> None:
    """Raises errors about the paths that a config names, before anything large is imported."""
    refuse_wrong_model(config.model.name_or_path)
    if config.checkpoint.store is None and "://" not in config.checkpoint.resume:
        checked_path(config, Words(), partial(resume_choice.of, config))
    for task in filter(is_task_file, config.eval.tasks):
        task_text(task)
    if any(
        name != "stdlib" and ":" not in name and not expanded(name).exists()
        for name in source_names(config)
    ):
        from threefold.run.sources import formats_of

        formats_of(config, here=True)  # a glob, or the prefix of a store, may name something


def deliver(config: Config) -> int:
    """Exports the trained model to the folder that a managed job keeps (SageMaker's SM_MODEL_DIR), if there is one."""
    job = environment.managed_job()
    if job is None or job.model is None or config.log.dir is None:
        return 0
    if job.model.exists() and any(job.model.iterdir()):
        print(f"{job.model} is not empty: the model stays in {config.log.dir}")
        return 0
    from threefold.export.model_folder import export

    done = export(Path(config.log.dir), job.model)
    print(f"{job.model}: step {done.step}, {done.num_parameters:,} parameters; {done.verified}")
    return 0


def _refuse_unrestartable(
    config: Config, info: environment.LaunchInfo, max_restarts: int
) -> None:
    problems = []
    if max_restarts:
        problems.append(
            Problem(
                f"--max-restarts {max_restarts}, but a launcher started this rank",
                "the launcher to restart the ranks that it started",
                f"torchrun --max-restarts {max_restarts} ... -m threefold train ..., and no --max-restarts after train",
            )
        )
    if info.max_restarts and config.log.dir is None:
        problems.append(
            Problem(
                f"torchrun --max-restarts {info.max_restarts} without log.dir",
                "a folder that restarted ranks can find; otherwise they would begin another run",
                "--log.dir FOLDER",
            )
        )
    ConfigError.raise_for(problems)


def topology_of_run(config: Config, *, force: bool = False) -> tuple[Topology, str]:
    """As `topology_here`; of the default mesh, which nobody asked for, only what the model and the batch allow."""
    topology, why = topology_here(config, force=force)
    if why != DEFAULT_ON_CPU:
        return topology, why
    problems: Callable[..., Iterable[Problem]] = batch_problems
    if config.model.name_or_path is not None or config.model.config is not None:
        from threefold.run.request import model_of, setup_problems

        _, architecture = model_of(config)
        problems = partial(setup_problems, architecture=architecture, device="cpu")
    refused = list(problems(config, topology=topology))
    if not refused or any(problems(config, topology=Topology())):
        return topology, why
    return Topology(), f"{why} is {topology}, which this run cannot use: {refused[0].what}"


def topology_here(config: Config, *, force: bool = False) -> tuple[Topology, str]:
    """Returns the mesh for the ranks to start on this machine, and why it was chosen.

    Raises:
        ConfigError: sizes that do not match, more ranks than devices, or, without `force`, more than fit here.
    """
    num_devices = None
    if config.mesh.device != "cpu":
        import torch

        num_devices = torch.cuda.device_count() or None
        if config.mesh.device == "cuda" and num_devices is None:
            raise ConfigError(
                "mesh.device = cuda, but torch sees no CUDA device",
                expected="a CUDA device and a torch build for it",
                fix="--mesh.device cpu, or install torch for your CUDA version (pytorch.org/get-started)",
            )
    topology, why = resolve(config.mesh, num_devices=num_devices)
    if num_devices is not None and topology.world_size > num_devices:
        raise ConfigError(
            f"mesh.dp x mesh.cp x mesh.tp = {topology.world_size}, but this machine has {num_devices} devices",
            expected="one device for each rank",
            fix="smaller mesh sizes, --mesh.device cpu, or torchrun on several machines",
        )
    if not force:
        if num_devices is None:
            refuse_too_many(topology.world_size, room_here())
        refuse_too_many_workers(config.data.num_workers, topology.world_size, room_here())
    return topology, why


def _run_rank(loaded: LoadedConfig, topology: Topology, why: str) -> int:
    collects = gc.isenabled()
    gc.disable()  # collecting would take one second of seven: what is imported stays alive
    from threefold.run.rank import run_rank

    if collects:
        gc.freeze()
        gc.enable()
    return run_rank(loaded, topology, why)


def _rank_entry(loaded: LoadedConfig, topology: Topology, why: str) -> int:
    return _run_rank(replace(loaded, last=True), topology, why)
