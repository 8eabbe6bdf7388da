"""The files and folders that a config names, and the same config from another folder."""

import contextlib
import difflib
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from threefold.config.schema import Config, value_at
from threefold.config.section import Sources
from threefold.errors import ConfigError, Problem, shell_word
from threefold.jsonl import object_of, open_file

# In a run's folder: what the run is, and the config with which it is resumed.
RUN_FILE, RUN_CONFIG = "run.json", "config.yaml"
# What it writes once it has begun.
METRICS, JOURNAL, AUDIT = "metrics.jsonl", "journal.jsonl", "audit.jsonl"
# The logger of the line with which each start begins in a rank's log: a JSON object with its process.
LOG_START = "threefold.start"
COPY_FILE = "copied-from.json"  # of a run's copy: where it continues, or has ended
PROFILE_FOLDER = "profile"  # what the ranks traced
EXPORT_FOLDER = "exports"  # what transformers loads
MODEL_FOLDER = "a folder with config.json and weights"
_NAMES = {"stdlib", "bytes"}
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_RESUME = "checkpoint.resume"
# A source's ~ is expanded, and that of a model has its own error.
_UNEXPANDED = ("log.dir", _RESUME, "data.tokenizer")
_PATHS = ("data.source", "eval.source", *_UNEXPANDED, "model.name_or_path")


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run writes, which a config.yaml alone does not show."""
    # os.path, for which a name that is too long or a folder that may not be entered is no file.
    records = any(os.path.isfile(folder / name) for name in (RUN_FILE, METRICS, JOURNAL, AUDIT))
    checkpoints = folder / "checkpoints"
    return records or (os.path.isdir(checkpoints) and any(checkpoints.glob("step-*")))


def is_of_program(run: Path) -> bool:
    """Whether a run's loop is a program's own (`threefold.Run`), by its run.json."""
    with contextlib.suppress(OSError), open_file(run / RUN_FILE) as file:
        return bool((object_of(file.read()) or {}).get("program"))
    return False


def run_of(config: Path) -> Path | None:
    """The folder of the run whose own config this file is; None for any other file."""
    return config.parent if config.name == RUN_CONFIG and is_run(config.parent) else None


def run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """The run's folder that a path names, and the checkpoint in it, if the path is of one.

    Raises:
        ConfigError: there is no run.
    """
    in_checkpoints = path.absolute().parent.name == "checkpoints" and path.name.startswith(
        "step-"
    )
    folder = path.absolute().parent.parent if in_checkpoints else path
    if not is_run(folder):
        runs = sorted(
            filter(is_run, Path("runs").glob("*")), key=lambda run: run.stat().st_mtime
        )
        raise ConfigError(
            f"{path} is not a run",
            expected="the folder of a run (log.dir)",
            fix=f"{shell_word(runs[-1])}   (the newest run here)" if runs else "check the path",
        )
    return folder, path if in_checkpoints else None


def literal_paths(config: Config) -> Iterator[Problem]:
    """Paths with what a shell would have expanded, where no file has that very name."""
    if (store := config.checkpoint.store) is not None:
        yield from _address_problems("checkpoint.store", store)
    for key in _PATHS:
        for text in _names(value_at(config, key)):
            home = text.startswith("~") and key in _UNEXPANDED
            address = text.startswith(("s3:", "gs:"))
            if "://" in text:
                from threefold.places.url import refuse_key

                refuse_key(text)
            if address if key.endswith("source") else key == _RESUME and "://" in text:
                yield from _address_problems(key, text)
            if "://" in text and key == "log.dir":
                kept = f" --checkpoint.store {text}" if address else ""
                yield Problem(
                    f"{key} = {text!r} is an address of a store",
                    "a folder on this machine or on a shared disk",
                    f"--{key} runs/NAME{kept}",
                )
            if (home or _VARIABLE.search(text)) and not os.path.lexists(text):
                yield Problem(
                    f"{key} = {text!r} does not exist, and {'~' if home else 'its $'} is taken literally",
                    "a literal path: a shell expands ~ and $NAME outside of single quotes, and nothing in a file does",
                    f"--{key} {text if home else json.dumps(text, ensure_ascii=False)}",
                )


def _address_problems(key: str, address: str) -> Sequence[Problem]:
    from threefold.places import url

    try:
        url.parse(url.without_pattern(address)[0] if key.endswith("source") else address)
    except ConfigError as error:
        return [replace(problem, fix=f"--{key} {problem.fix}") for problem in error.problems]
    return ()


def tokenizer_name(config: Config) -> tuple[str, str]:
    """Returns the tokenizer's name, and the reason for it."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer, "as given"
    if config.model.name_or_path is not None:
        return config.model.name_or_path, "the model's own"
    return "bytes", "the model has random weights and none was given"


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths in place of relative ones that exist here; names of the Hub stay as they are."""
    data = config.data
    mixture = data.mixture and {
        name: source.model_copy(update={"source": _absolutes(source.source)})
        for name, source in data.mixture.items()
    }
    return config.changed(
        model={"name_or_path": _absolute(config.model.name_or_path)},
        data={
            "source": _absolutes(data.source),
            "tokenizer": _absolute(data.tokenizer),
            "chat_template": _absolute(data.chat_template),
            "mixture": mixture,
        },
        eval={
            "source": _absolutes(config.eval.source),
            "tasks": tuple(
                _absolute(each) if is_task_file(each) else each for each in config.eval.tasks
            ),
        },
    )


def source_names(config: Config) -> list[str]:
    """All sources that a config names, for training and evaluation."""
    mixture = (config.data.mixture or {}).values()
    named = [each.source for each in mixture] or [config.data.source]
    return [name for each in (*named, config.eval.source) for name in _names(each)]


def _names(named: Sources | None) -> Sequence[str]:
    return (named,) if isinstance(named, str) else named or ()


def is_task_file(named: str) -> bool:
    """Whether one of `eval.tasks` is a file, not a name."""
    return named.endswith((".yaml", ".yml"))


def task_text(named: str) -> str:
    """The text of a task's file; ConfigError if it cannot be read."""
    try:
        return Path(named).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{named}: {error.strerror}", expected="a task's file", fix="check the path"
        ) from error


def expanded(named: str) -> Path:
    """A path, its `~` expanded, if the user that it names has a home."""
    return Path(os.path.expanduser(named))


def _absolutes(named: Sources | None) -> Sources | None:
    return (
        tuple(str(_absolute(each)) for each in named)
        if isinstance(named, tuple)
        else _absolute(named)
    )


def _absolute(named: str | None) -> str | None:
    if named is None or named in _NAMES or ":" in named:
        return named
    exists = Path(named).exists() or (
        glob.has_magic(named) and any(glob.iglob(named, recursive=True))
    )
    return str(Path(named).absolute()) if exists else named


_MERGE = (
    "python -c 'import sys, peft, transformers; adapters, to = sys.argv[1:]; "
    "peft.AutoPeftModelForCausalLM.from_pretrained(adapters).merge_and_unload().save_pretrained(to); "
    "transformers.AutoTokenizer.from_pretrained(adapters).save_pretrained(to)'"
)


def refuse_wrong_model(name: str | None) -> None:
    """ConfigError if `name` is something here from which no model can be read, or a path at which nothing is."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"model.name_or_path = {name!r} holds adapters, which transformers would load with the model",
                expected="a whole model: adapters are merged into it, or left out",
                fix=f"{_MERGE} {shell_word(path)} DIR   and --model.name_or_path DIR",
            )
        if not (path / "config.json").is_file():
            raise _without_config(path)
    elif path.exists():
        raise ConfigError(
            f"model.name_or_path = {name!r} is a file, not a folder",
            expected=MODEL_FOLDER,
            fix=f"{_model(path.parent)}   (the folder of the file)",
        )
    elif re.match(r"[./~]|.*(/$|\\|/.*/)", name):  # an id on the Hub is NAME or OWNER/NAME
        near = near_folder(path)
        fix = f"did you mean {near}?" if near else "check the path"
        if name.startswith("~") and expanded(name).is_dir():
            fix = f"{_model(expanded(name))}   (the shell expands ~, but it was quoted)"
        raise ConfigError(
            f"model.name_or_path = {name!r}: no such folder", expected=MODEL_FOLDER, fix=fix
        )


def _without_config(path: Path) -> ConfigError:
    what = f"model.name_or_path = {str(path)!r} has no config.json"
    fix = "check the path"
    inside = sorted(each.parent for each in path.glob("*/config.json"))
    if not any(path.iterdir()):
        what = f"model.name_or_path = {str(path)!r} is an empty folder"
    elif (path / "checkpoints").is_dir():
        what += ": it is the folder of a run"
        fix = f"threefold export {shell_word(path)} --to DIR   and --model.name_or_path DIR"
    elif inside:
        fix = "   or   ".join(map(_model, inside[:3]))
    return ConfigError(what, expected=MODEL_FOLDER, fix=fix)


def _model(folder: Path) -> str:
    return f"--model.name_or_path {shell_word(folder)}"


def near_folder(path: Path) -> Path | None:
    """The folder next to `path` with the most similar name."""
    names = [each.name for each in path.parent.glob("*") if each.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.with_name(near[0]) if near else None
