"""Documents from a dataset of the Hugging Face Hub, or from a folder that `datasets` reads, one per row.

The dataset is loaded as memory-mapped Arrow files in the cache of `datasets`; only the text column is read. Its own
fingerprint identifies the content. It pickles as the paths of those files, so other processes map them too. No code
from the dataset's repository runs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.data.text.rows import not_text, rows_of_texts
from threefold.data.text.source import Piece, ReadLog, Source, missing_field
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

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        num_rows = len(self.dataset)
        row_bytes = max(1, self.dataset.data.nbytes // max(num_rows, 1))
        step = max(1, _PIECE_BYTES // row_bytes)
        stops = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
        return [Piece(0, start, stop, (stop - start) * row_bytes) for start, stop in stops]

    def read(self, piece: Piece, log: ReadLog) -> Iterator[str]:
        for start in range(piece.start, piece.stop, _BATCH_ROWS):
            texts = self.dataset[start : min(start + _BATCH_ROWS, piece.stop)][self.text_field]
            yield from rows_of_texts(list(texts), where=self.name, first_row=start, log=log)


def open_hub(source: Source) -> HubRows:
    """One split of `hf:ID`; a DataError if it cannot be read, or has no such split, configuration or field."""
    import datasets

    dataset_id, text_field = source.name.removeprefix("hf:"), source.text_field
    folder = Path(dataset_id).expanduser()
    if dataset_id.startswith((".", "/", "~")) and not folder.is_dir():
        raise DataError(
            f"data.source = 'hf:{dataset_id}' is not a folder",
            expected=f"hf:OWNER/NAME as on the Hub, or hf:FOLDER, relative to {Path.cwd()}",
            fix="--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)",
        )
    try:
        dataset = datasets.load_dataset(
            str(folder) if folder.is_dir() else dataset_id,
            name=source.config_name,
            split=source.split,
            revision=source.revision,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _not_loaded(source, error) from error
    if text_field not in dataset.column_names:
        raise missing_field(source.name, field=text_field, fields=dataset.column_names)
    kind = getattr(dataset.features[text_field], "dtype", type(dataset.features[text_field]).__name__)
    if kind not in ("string", "large_string"):
        raise not_text(source.name, field=text_field, kind=str(kind))
    recipe = f"hub 1 {dataset._fingerprint} {text_field!r}"
    fingerprint = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    return HubRows(source.name, dataset.select_columns([text_field]), text_field, fingerprint)


def _not_loaded(source: Source, error: Exception) -> ThreefoldError:
    """The user's error for an error of `load_dataset`: the first known one whose class, or word of the text, fits."""
    import datasets

    # A generation error only reports where it happened; its cause is the problem with the file.
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
    reason = (str(cause).splitlines() or [type(error).__name__])[0]
    name, dataset_id = f"data.source = {source.name!r}", source.name.removeprefix("hf:")
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
            f"--data.source {dataset_id}   (reads the files of a folder directly, and names the line)",
        ),
        (
            FileNotFoundError,
            f"{name} has no data: {reason}",
            "hf:OWNER/NAME as on the Hub, or hf:FOLDER with data files",
            "--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)",
        ),
        (
            "save_to_disk",
            f"{name} is a folder written by datasets' save_to_disk",
            "a folder or an id that datasets.load_dataset reads",
            "dataset.to_parquet('data.parquet')   in Python, then --data.source data.parquet",
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
