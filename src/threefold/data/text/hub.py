"""Documents from a dataset of the Hugging Face Hub, or from a folder that `datasets` reads or wrote, one per row.

The dataset is loaded as memory-mapped Arrow files in the cache of `datasets`, or in the folder of `save_to_disk`; only
the text column is read. Its own fingerprint identifies the content; a folder of files is identified by their content,
because `datasets` tells them apart by paths, sizes and times alone, and has a cache of its own for each. It pickles as
the paths of the Arrow files, so other processes map them too. No code from the dataset's repository runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.data.text.fields import AGAIN, TextField, require_text, rows_of_table
from threefold.data.text.files import Digests
from threefold.data.text.source import Document, Labeller, LabellerFor, LossMask, Piece, ReadLog, Source
from threefold.errors import DataError, Problem, ThreefoldError

if TYPE_CHECKING:
    from datasets import Dataset

_PIECE_BYTES = 4 << 20
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubRows:
    """The text column of one split; `fingerprint` is of the rows and of the column's name."""

    name: str
    dataset: Dataset
    text_field: str
    fingerprint: str
    labeller: Labeller | None = None

    @property
    def loss_mask(self) -> LossMask | None:
        return self.labeller.loss_mask if self.labeller is not None else None

    def unchanged(self, piece: Piece) -> str:
        """Nothing: its files are those of a cache, in which none is written twice."""
        return ""

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        num_rows = len(self.dataset)
        row_bytes = max(1, self.dataset.data.nbytes // max(num_rows, 1))
        step = max(1, _PIECE_BYTES // row_bytes)
        stops = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
        return [Piece(0, start, stop, (stop - start) * row_bytes) for start, stop in stops]

    def read(self, piece: Piece, log: ReadLog) -> Iterator[Document]:
        import pyarrow

        for start in range(piece.start, piece.stop, _BATCH_ROWS):
            stop = min(start + _BATCH_ROWS, piece.stop)
            try:
                table = self.dataset[start:stop]
                take = self.labeller or TextField(self.text_field)
                yield from rows_of_table(table, take, where=self.name, first_row=start, log=log)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                what = f"{self.name}, rows {start} to {stop - 1}: {str(error).splitlines()[0]}"
                log.bad(what, expected="undamaged rows", fix=AGAIN, count=stop - start)


def open_hub(source: Source, labeller_for: LabellerFor | None = None, *, memory: Path | None = None) -> HubRows:
    """One split of `hf:ID`; a DataError if it cannot be read, or has no such split, configuration or field.

    Args:
        memory: where digests of a folder's files are remembered.
    """
    import datasets

    assert isinstance(source.name, str)
    dataset_id = source.name.removeprefix("hf:")
    folder = Path(dataset_id).expanduser()
    if is_saved(folder):
        return open_saved(source, folder, labeller_for)
    if dataset_id.startswith((".", "/", "~")) and not folder.is_dir():
        raise DataError(
            f"data.source = 'hf:{dataset_id}' is not a folder",
            expected=f"hf:OWNER/NAME as on the Hub, or hf:FOLDER, relative to {Path.cwd()}",
            fix="--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)",
        )
    content = _content_of(folder, memory) if folder.is_dir() else None
    try:
        dataset = datasets.load_dataset(
            str(folder) if folder.is_dir() else dataset_id,
            cache_dir=f"{datasets.config.HF_DATASETS_CACHE}/threefold-{content}" if content is not None else None,
            name=source.config_name,
            split=source.split,
            revision=source.revision,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _not_loaded(source, error) from error
    identity = f"{content} {source.config_name} {source.split}" if content is not None else None
    return _rows_of(dataset, source.name, source.text_field, labeller_for, identity)


def _content_of(folder: Path, memory: Path | None) -> str:
    """Digest of all files of a folder: their paths in it, sizes and contents."""
    digests, whole = Digests(folder, memory), hashlib.blake2b(digest_size=16)
    for path in sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()):
        with contextlib.suppress(OSError):  # who reads it names it
            size, content = digests.of(path)
            whole.update(f"\n{path}\0{size}\0{content}".encode(errors="surrogateescape"))
    digests.keep()
    return whole.hexdigest()


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def open_saved(source: Source, folder: Path, labeller_for: LabellerFor | None = None) -> HubRows:
    """The rows of a folder of `save_to_disk`; of several splits the source's. A DataError if it cannot be read."""
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # of many classes: files that are missing, cut, or of another version
        raise DataError(
            f"data.source = {source.name!r} is a folder written by save_to_disk that cannot be read: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}",
            expected="the complete folder, as datasets.load_from_disk reads it",
            fix="copy the folder or save the dataset again",
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise DataError(
                f"data.split = {source.split!r}: {source.name!r} has no such split",
                expected=f"one of {', '.join(dataset) or 'none'}",
                fix=f"--data.split {next(iter(dataset), 'NAME')}",
            )
        dataset = dataset[source.split]
    return _rows_of(dataset, str(source.name), source.text_field, labeller_for)


def _rows_of(
    dataset: Dataset, name: str, text_field: str, labeller_for: LabellerFor | None, identity: str | None = None
) -> HubRows:
    identity = identity or dataset._fingerprint
    labeller = labeller_for(dataset.column_names) if labeller_for is not None else None
    if labeller is not None:
        recipe = f"hub 1 {identity} {labeller.recipe}"
        fingerprint = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
        rows = dataset.select_columns([name for name in labeller.columns if name in dataset.column_names]).with_format(
            "arrow"
        )
        return HubRows(name, rows, text_field, fingerprint, labeller)
    require_text(name, dataset.features.arrow_schema, text_field)
    recipe = f"hub 1 {identity} {text_field!r}"
    fingerprint = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    column = text_field if text_field in dataset.column_names else text_field.partition(".")[0]
    return HubRows(name, dataset.select_columns([column]).with_format("arrow"), text_field, fingerprint)


def _not_loaded(source: Source, error: Exception) -> ThreefoldError:
    """The user's error for an error of `load_dataset`: the first known one whose class, or word of the text, fits."""
    import datasets

    # A generation error only reports where it happened; its cause is the problem with the file.
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
    reason = (str(cause).splitlines() or [type(error).__name__])[0]
    name, dataset_id = f"data.source = {source.name!r}", str(source.name).removeprefix("hf:")
    again = f"--data.source {dataset_id}   (reads the files of a folder directly, and names the line)"
    if not Path(dataset_id).expanduser().is_dir():
        again = f"--data.revision COMMIT   (one before the damage), or report it at hf.co/datasets/{dataset_id}"
    known: list[tuple[type[Exception] | str, str, str, str]] = [
        (
            datasets.exceptions.DatasetNotFoundError,
            f"{name} is not on the Hub, or you have no access: {reason}",
            "hf:OWNER/NAME as on the Hub, or hf:FOLDER",
            "check the name and the revision; for a gated dataset   hf auth login",
        ),
        (
            ConnectionError,
            f"{name} is not in the cache, and the Hub could not be reached: {reason}",
            "a dataset downloaded before, a folder, or a connection to the Hub",
            f"hf download --repo-type dataset {dataset_id}   on a machine with internet, then --data.source hf:FOLDER",
        ),
        (
            datasets.exceptions.DatasetsError,
            f"{name} exists, but one of its files cannot be read: {reason}",
            "data files that datasets.load_dataset can read",
            again,
        ),
        (
            FileNotFoundError,
            f"{name} has no data: {reason}",
            "hf:OWNER/NAME as on the Hub, or hf:FOLDER with data files",
            "--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)",
        ),
        (
            "split",
            f"data.split = {source.split!r}: {source.name!r} has no such split: {reason}",
            "a split of the dataset",
            "--data.split NAME   (one of the splits above)",
        ),
        (
            "onfig",
            f"data.config_name = {source.config_name!r}: {reason}",
            "a configuration of the dataset",
            "--data.config_name NAME   (one of those above)",
        ),
        (
            Exception,
            f"{name} cannot be loaded: {reason}",
            "a dataset that datasets.load_dataset reads",
            "pip install -U datasets   (or read the files directly: --data.source FOLDER)",
        ),
    ]
    found = (sign in reason if isinstance(sign, str) else isinstance(error, sign) for sign, *_ in known)
    return DataError.of([Problem(*next(itertools.compress(known, found))[1:])])
