"""`threefold data prepare`: here, as one task of many, as a Slurm array, or by the tasks of a Ray cluster."""

import re
import shlex
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from threefold.commands.arguments import is_address, load_config, split
from threefold.commands.show_rows import warn_of_no_end
from threefold.config.dropped import DROPPED
from threefold.config.schema import DataConfig
from threefold.config.yaml_text import pasted
from threefold.data.chat.labeller import labeller_for
from threefold.data.store import parts_proof
from threefold.data.store import prepare as stores
from threefold.data.store.blocks import SUFFIX, Blocks, with_suffix
from threefold.data.store.open_source import files_of, open_text, refuse_without_effect
from threefold.data.store.parts import PartMaker
from threefold.data.store.shared_parts import SharedParts
from threefold.data.text.listing import FileList, summary, write_list
from threefold.data.text.source import Source
from threefold.data.tokens import Tokenizer, for_texts
from threefold.errors import ConfigError
from threefold.mesh.environment import cache_folder, variables
from threefold.progress_bars import Bars
from threefold.run.sources import sources_of, tokenizer_of

_JOIN = "join"
_MOST_TASKS = 64


def prepare(
    arguments: Sequence[str], *, to: str, workers: int | None, engine: str, task: str | None
) -> None:
    """Executes the command; errors are ThreefoldErrors."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", task or "")
    if task and (
        engine != "local"
        or not (task == _JOIN or (numbers and int(numbers[1]) < int(numbers[2])))
    ):
        raise ConfigError(
            f"--task {task} with --engine {engine}",
            expected="I/N, with I from 0 to N - 1, or join; and no --engine, which has its own tasks",
            fix="--task 0/8 --engine local",
        )
    if engine == "slurm":
        return _submit(arguments, to, workers)
    shared, source, lists = _asked(arguments, to, alone=engine == "local" and task is None)
    make: stores.MakeParts | None = None
    if task == _JOIN:
        make = shared.collect
    elif numbers is not None:
        made = shared.make_share(int(numbers[1]), int(numbers[2]), num_workers=workers)
        return typer.echo(
            f"task {task}: {made:,} parts are made, the others of this task already existed"
        )
    elif engine == "ray":
        from threefold.data.store.by_ray import make_by_ray

        make = partial(make_by_ray, shared)
    store = _made(shared, to, workers, make)
    info, objective = store.info, "--train.objective dpo " if store.info.pairs else ""
    if info.loss_mask is not None:
        typer.echo(f"  {info.mask_summary}")
        warn_of_no_end(info.loss_mask, source.labels.chat_template or info.tokenizer)
    if info.num_skipped:
        typer.echo(
            f"  {info.num_skipped:,} lines, rows or files could not be read and were skipped"
        )
    if lists:
        typer.echo(f"the files are {write_list(lists, store.prefix.parent)}", err=True)
    typer.echo(
        f"use it: threefold train {objective}--data.source {shlex.quote(to)} "
        f"--data.tokenizer {shlex.quote(info.tokenizer)}"
    )


def _asked(
    arguments: Sequence[str], to: str, *, alone: bool
) -> tuple[SharedParts, Source, list[FileList]]:
    """The store to prepare, its path and files; `alone`: no other process makes parts of it."""
    refuse_flags(arguments, "prepare")
    source, tokenizer = source_of(arguments, "prepare")
    names = (source.name,) if isinstance(source.name, str) else source.name
    if Path(to).is_dir() and Path(to).resolve() in [Path(name).resolve() for name in names]:
        raise ConfigError(
            f"--to {to} is the source",
            expected="another folder: this one would be read as the store, without what is added to it later",
            fix=f"--to {shlex.quote(f'{Path(to)}-tokens')}",
        )
    encoder = for_texts(tokenizer, source.labels)
    address = to if is_address(to) else None
    # With the digests of the files, other tasks need not read all of them for the fingerprint.
    memory = cache_folder() / "files" if address else Path(to, f"{stores.PARTS}files")
    text = open_text(source, labeller_for(source, tokenizer), memory=None if alone else memory)
    if lists := files_of(source):
        typer.echo(summary(lists), err=True)
    request = stores.request_of(text, encoder, skip_bad=source.skip_bad_lines)
    folder = cache_folder() / "tokens" / request if address else Path(to)
    maker = PartMaker(text, encoder, folder / f"{stores.PARTS}{request}", source.skip_bad_lines)
    return SharedParts(maker, address), source, lists


def _made(
    shared: SharedParts, to: str, workers: int | None, make: stores.MakeParts | None
) -> stores.PreparedStore:
    """The store, proved, and sent if it is for an address."""
    maker = shared.maker
    prefix = maker.folder.parent / stores.STORE_NAME
    with Bars().show(f"preparing {maker.source.name}") as bar:
        store = stores.prepare(
            maker.source,
            maker.tokenizer,
            to=prefix.parent,
            skip_bad=maker.skip_bad,
            num_workers=workers,
            progress=lambda done, total: bar.at(done, total=total),
            make=make,
            record=partial(parts_proof.write, prefix),
        )
    proof = parts_proof.prove(prefix, read=False)
    if shared.address is not None:
        _send(prefix, to)
        shared.remove()
    info = store.info
    how = "already exists" if store.reused else "is made"
    where = f"{to}/{prefix.name}" if shared.address else prefix
    typer.echo(
        f"{where}.bin {how}: {info.num_tokens:,} tokens in {info.counted} ({info.tokenizer})\n{proof}"
    )
    return store


def _send(prefix: Path, to: str) -> None:
    """Sends a store; on every host that has made it, these are the same bytes."""
    from threefold.places.upload import send_files

    files = {path.name: path for path in sorted(prefix.parent.glob(f"{prefix.name}.*"))}
    hashes = Blocks.read(with_suffix(prefix, SUFFIX))
    assert hashes is not None, f"{prefix} has lost its hashes"
    with tempfile.TemporaryDirectory(prefix="threefold-hashes-") as folder:
        name = prefix.name + SUFFIX
        files[name] = Path(folder, name)
        hashes.timeless().write(files[name])
        send_files(files, to, variables())


def _submit(arguments: Sequence[str], to: str, workers: int | None) -> None:
    """Submits tasks for the parts that are missing, and the job that joins."""
    from threefold.commands.submit import read_config
    from threefold.jobs import settings, slurm

    job, asked = settings.read(slurm.SlurmSettings, arguments, variables())
    shared, _, _ = _asked(asked, to, alone=False)
    num_tasks = min(_MOST_TASKS, len(shared.plan))
    script = slurm.preparation(
        read_config(*split(asked)), job, to, num_tasks=num_tasks, workers=workers
    )
    numbers = {part.number % num_tasks for part in shared.missing()}
    typer.echo(slurm.send_preparation(script, job, sorted(numbers)))


def refuse_flags(arguments: Sequence[str], command: str) -> None:
    """Raises ConfigError for a flag that is a key of the section `data` under another name."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        key = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        if argument.startswith("--") and (
            key in DataConfig.model_fields or f"data.{key}" in DROPPED
        ):
            value = (
                "false"
                if flag.startswith("--no-")
                else "true"
                if key == "skip_bad_lines"
                else "VALUE"
            )
            raise ConfigError(
                f"{flag} is not an option of `threefold data {command}`",
                expected="keys of the config, as every command takes them: --data.KEY VALUE, or a config file",
                fix=DROPPED.get(f"data.{key}", f"--data.{key} {value}"),
            )


def source_of(arguments: Sequence[str], command: str) -> tuple[Source, Tokenizer]:
    """The source and the tokenizer of a config file, or of a command that gives both."""
    loaded, (path, _) = load_config(arguments), split(arguments)
    config = loaded.config
    if config.data.mixture is not None:
        first = next(iter(config.data.mixture.values())).source
        raise ConfigError(
            f"data.mixture = {', '.join(config.data.mixture)} with `threefold data {command}`",
            expected="one source at a time",
            fix=f"--data.mixture null --data.source {pasted(first)}",
        )
    needed = {"data.source": "FILE_OR_FOLDER"}
    if not config.model.name_or_path:
        needed["data.tokenizer"] = "bytes   (or that of a model)"
    for key, value in needed.items():
        if path is None and key not in loaded.origins:
            raise ConfigError(
                f"{key} is not given",
                expected="a source, and the tokenizer to read it with, or a config file",
                fix=f"--{key} {value}",
            )
    source = sources_of(config)["data.source"]
    refuse_without_effect([source])
    return source, tokenizer_of(config)
