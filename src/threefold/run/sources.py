"""The sources that a config names, and their files: which are read, which are left out and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from threefold.config.schema import Config, MixtureSource
from threefold.config.text import pasted
from threefold.data.store.resolve import files_of, has_labels
from threefold.data.text.listing import kind_of, summary, write_list
from threefold.data.text.source import Labels, Source
from threefold.errors import DataError, Problem, ThreefoldError
from threefold.mesh.environment import cache_folder, data_path

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

T = TypeVar("T")

# The key itself, not a path that holds these words.
_SOURCE_KEY = re.compile(r"(?<![\w/.'\"])data\.source(?!\w|/|\.\w|['\"])")
_OTHER_DATA = "the saved state has data = "


def sources_of(config: Config, *, held_out: bool = False) -> dict[str, Source]:
    """The sources of the training data, or of the evaluation, by the keys that name them."""
    data, evaluation = config.data, config.eval
    if held_out:
        assert evaluation.source is not None
        own = MixtureSource(source=evaluation.source, weight=1, split=evaluation.split)
        return {"eval.source": _source(config, own)}
    if data.mixture is None:
        return {"data.source": _source(config, MixtureSource(source=data.source, weight=1))}
    return {f"data.mixture.{name}": _source(config, source) for name, source in data.mixture.items()}


def opened(key: str, open_source: Callable[[], T]) -> T:
    """What `open_source` returns; its errors name the source by its key."""
    try:
        return open_source()
    except ThreefoldError as error:
        raise type(error).of(_named(key, each) for each in error.problems) from error


def file_lines(config: Config, *, to: Path | None = None) -> list[str]:
    """`12 files read (3.1 GiB), 4 left out (2 .bin, 2 hidden)`, of the sources that are files; else nothing.

    Args:
        to: a folder, in which the files are listed.
    """
    sources = sources_of(config) | (sources_of(config, held_out=True) if config.eval.source else {})
    lists = [each for key, source in sources.items() for each in opened(key, functools.partial(files_of, source))]
    if to is None or not lists:
        return [summary(lists)] if lists else []
    return [f"{summary(lists)}; {write_list(lists, to)}"]


def with_glob(error: DataError, config: Config) -> ThreefoldError:
    """The error of a run on other data, whose fix names the glob for a folder that is read otherwise since 0.1.0.

    The first release read no .json, .csv, .gz and .zst, every README, and a linked file under each of its names.
    """
    source = config.data.source
    glob = f"{source}/**/*.{{txt,md,py,jsonl,parquet}}"
    with contextlib.suppress(DataError):
        now, then = ([path for each in files_of(Source(name)) for path in each.read] for name in (source, glob))
        kept = {path for path in now if (kind := kind_of(path)) is not None and not kind.is_later}
        if isinstance(source, str) and Path(source).expanduser().is_dir() and now != then and kept and kept <= {*then}:
            fix = f"--data.source {pasted(glob)}   (reads the folder as 0.1.0 did), or "
            found = ((each, fix if each.what.startswith(_OTHER_DATA) else "") for each in error.problems)
            return DataError.of(dataclasses.replace(each, fix=f"{fix}{each.fix}") for each, fix in found)
    return error


def _source(config: Config, source: MixtureSource) -> Source:
    """Settings that a source omits come from the data section."""
    data, named = config.data, source.source
    return Source(
        data_path(named) if isinstance(named, str) else tuple(map(data_path, named)),
        text_field=source.text_field or data.text_field,
        split=source.split or data.split,
        config_name=source.config_name or data.config_name,
        revision=source.revision or data.revision,
        skip_bad_lines=data.skip_bad_lines,
        labels=Labels(
            data.format,
            data.fields,
            data.train_on,
            data.train_on_end,
            data.chat_template,
            data.template_variables,
            data.chat_date,
            data.control_tokens,
            data.bos,
            data.skip_empty_targets,
        ),
    )


def with_packing(config: Config, mesh: Mesh) -> Config:
    """The config with data.packing and data.document_mask, which depend on what the source holds if not given."""
    data = config.data
    if data.packing is not None and data.document_mask is not None:
        return config

    def labelled() -> bool:
        # What is wrong with a source is said when it is read.
        with contextlib.suppress(ThreefoldError):
            return any(has_labels(source, memory=cache_folder() / "files") for source in sources_of(config).values())
        return False

    found = mesh.once_per_host("format", labelled)
    update = {
        "packing": data.packing or ("best_fit" if found else "concat"),
        "document_mask": found if data.document_mask is None else data.document_mask,
    }
    return config.model_copy(update={"data": data.model_copy(update=update)})


def _named(key: str, problem: Problem) -> Problem:
    # The reader of a source always names data.source.
    if key.startswith("data.mixture."):
        return dataclasses.replace(problem, what=f"{key}: {problem.what}")
    return Problem(*(_SOURCE_KEY.sub(key, text) for text in dataclasses.astuple(problem)))
