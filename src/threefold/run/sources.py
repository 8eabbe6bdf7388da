"""The sources that a config names, and their files: which are read, which are left out and why."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from threefold.config.paths import source_names, tokenizer_name
from threefold.config.schema import Config, MixtureSource
from threefold.data.store.open_source import files_of, refuse_without_effect, rows_format
from threefold.data.text.listing import summary, write_list
from threefold.data.text.source import PREFERENCE, Labels, Source
from threefold.data.tokens import MODEL_KEY, Tokenizer, load_tokenizer
from threefold.errors import ConfigError, Problem, ThreefoldError
from threefold.mesh.environment import cache_folder, data_path

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

T = TypeVar("T")

# The key itself, not a path that holds these words.
_SOURCE_KEY = re.compile(r"(?<![\w/.'\"])data\.source(?!\w|/|\.\w|['\"])")
_HELD_OUT = "eval.source"
_FIELDS = re.compile(r"--data\.fields '([^']*)'")


def sources_of(config: Config, *, held_out: bool = False) -> dict[str, Source]:
    """The sources of the training data, or of the evaluation, by the keys that name them."""
    data, evaluation = config.data, config.eval
    if held_out:
        assert evaluation.source is not None
        own = MixtureSource(source=evaluation.source, weight=1, split=evaluation.split)
        return {_HELD_OUT: _source(config, own)}
    if data.mixture is None:
        return {"data.source": _source(config, MixtureSource(source=data.source, weight=1))}
    return {
        f"data.mixture.{name}": _source(config, source) for name, source in data.mixture.items()
    }


def _all_sources(config: Config) -> dict[str, Source]:
    """Those that are trained on, and the one that is evaluated on alone."""
    held_out = sources_of(config, held_out=True) if config.eval.source else {}
    return sources_of(config) | held_out


def tokenizer_of(config: Config) -> Tokenizer:
    """Returns the tokenizer that the config asks for."""
    name, _ = tokenizer_name(config)
    if name == config.model.name_or_path:
        return own_tokenizer(
            config, key="data.tokenizer" if config.data.tokenizer is not None else MODEL_KEY
        )
    return load_tokenizer(name)


def own_tokenizer(config: Config, *, key: str = MODEL_KEY) -> Tokenizer:
    """The tokenizer of the model."""
    assert config.model.name_or_path is not None
    return load_tokenizer(config.model.name_or_path, revision=config.model.revision, key=key)


def opened(key: str, open_source: Callable[[], T]) -> T:
    """The result of `open_source`; its errors name the source by its key."""
    try:
        return open_source()
    except ThreefoldError as error:
        raise type(error).of(_named(key, each) for each in error.problems) from error


def file_lines(config: Config, *, to: Path | None = None) -> list[str]:
    """`12 files read (3.1 GiB), 4 left out (2 .bin, 2 hidden)`, of the sources that are files; else nothing.

    Args:
        to: a folder, in which the files are listed.
    """
    lists = [
        dataclasses.replace(files, key=key)
        for key, source in _all_sources(config).items()
        for files in opened(key, functools.partial(files_of, source))
    ]
    if to is None or not lists:
        return [summary(lists)] if lists else []
    return [f"{summary(lists)}; {write_list(lists, to)}"]


def _source(config: Config, source: MixtureSource) -> Source:
    """Settings that a source omits come from the data section."""
    data, named = config.data, source.source
    return Source(
        data_path(named) if isinstance(named, str) else tuple(map(data_path, named)),
        split=source.split or data.split,
        config_name=source.config_name or data.config_name,
        revision=source.revision or data.revision,
        skip_bad_lines=data.skip_bad_lines,
        labels=Labels(
            data.format,
            data.fields if source.fields is None else source.fields,
            data.train_on,
            data.lost_texts,
            data.chat_template,
            data.template_variables,
            data.control_tokens,
            data.bos,
        ),
    )


def refuse_labels_without_effect(config: Config, *, here: bool = False) -> None:
    """Refuses keys about labels where no source has rows for them: a DataError.

    Args:
        here: only if all sources are on this machine.
    """
    if not (here and any(name.startswith("hf:") for name in source_names(config))):
        refuse_without_effect([*_all_sources(config).values()], memory=cache_folder() / "files")


def with_packing(config: Config, mesh: "Mesh") -> Config:
    """The config with data.packing and data.document_mask, which depend on what the source holds if not given.

    Raises:
        ConfigError: the sources have rows that train.objective does not train on; on every rank.
    """
    data = config.data
    formats = mesh.once_per_host("format", lambda: formats_of(config))
    refuse_other_rows(formats, config.train.objective)
    labelled = any(format != "text" for key, format in formats.items() if key != _HELD_OUT)
    update = {
        "packing": data.packing or ("best_fit" if labelled else "concat"),
        "document_mask": labelled if data.document_mask is None else data.document_mask,
    }
    return config.changed(data=update)


def formats_of(config: Config, *, here: bool = False) -> dict[str, str]:
    """The format of each source's rows, by the key that names it, for those that can be read.

    Args:
        here: before ranks are started: errors of a source are raised now.
    """
    formats = {}
    for key, source in _all_sources(config).items():
        # Ranks report errors of a source when they read it.
        with contextlib.suppress(*(() if here else (ThreefoldError,))):
            formats[key] = opened(
                key, functools.partial(rows_format, source, memory=cache_folder() / "files")
            )
    return formats


def refuse_other_rows(formats: Mapping[str, str], objective: str) -> None:
    """Refuses pairs of answers beside other rows, pairs that nothing compares, and a comparison without pairs.

    Args:
        formats: of `formats_of`.
        objective: `train.objective`.

    Raises:
        ConfigError: names the source.
    """
    pairs = [key for key, format in formats.items() if format == PREFERENCE]
    others = [key for key in formats if key not in pairs]
    if pairs and others:
        raise ConfigError(
            f"{pairs[0]} has pairs of answers (preference), and {others[0]} rows of the format {formats[others[0]]}",
            expected="sources of one kind: a loss compares the two answers of a pair, or trains on rows one by one",
            fix=f"leave out {pairs[0]} or {others[0]}   (or, to train on the chosen answers: a store of them, made by "
            "threefold data prepare --data.format prompt_completion --data.fields '{completion: chosen}' ...)",
        )
    if pairs and objective != "dpo":
        raise ConfigError(
            f"{pairs[0]} has pairs of answers (preference): rejected answers would be trained on like those chosen",
            expected=f"rows to train on one by one, for train.objective = {objective}",
            fix="--train.objective dpo   (to train on the chosen answers alone: "
            "--data.format prompt_completion --data.fields '{completion: chosen}', of whole conversations "
            "--data.format chat --data.fields '{messages: chosen}' --data.train_on last; a token store is made again "
            "with these keys: threefold data prepare --data.format ... --data.fields ...)",
        )
    if others and objective == "dpo":
        raise ConfigError(
            f"train.objective = dpo, but {others[0]} has rows of the format {formats[others[0]]}",
            expected="pairs of answers: the columns chosen and rejected, with or without prompt",
            fix="--train.objective next_token, or rows with these columns   (by other names: "
            "--data.fields '{chosen: better, rejected: worse}')",
        )


def _named(key: str, problem: Problem) -> Problem:
    # The reader of a source always names data.source.
    if key.startswith("data.mixture."):
        fix = _FIELDS.sub(r"fields: \1 in the source", problem.fix)
        return dataclasses.replace(problem, what=f"{key}: {problem.what}", fix=fix)
    what, expected, fix = (
        _SOURCE_KEY.sub(key, text) for text in (problem.what, problem.expected, problem.fix)
    )
    if key == _HELD_OUT and (fields := _FIELDS.search(fix)):
        # Of other names for both, those of the rows that are trained on would be wrong.
        what = f"{key}: {what}"
        fix = (
            f"threefold data prepare ... {fields[0]} --to DIR   of these rows, and --{key} DIR"
        )
    return Problem(what, expected, fix)
