"""Documents from a dataset of the Hugging Face Hub, or from a folder that `datasets` reads or wrote, one per row.

The dataset is loaded as memory-mapped Arrow files in the cache of `datasets`, or in the folder of `save_to_disk`; only
the text column is read. Their bytes identify the content, and are checked while they are read. The Arrow files of a
folder that `datasets` reads have their own cache, by the bytes of the folder: they are used only if none of its files
had changed when they were complete. It pickles as the paths of the Arrow files, so other processes map them too.
No code from the dataset's repository runs.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from threefold.config.paths import expanded
from threefold.data.text.fields import AGAIN, TextField, require_text, rows_of_table
from threefold.data.text.known_bytes import Digests, HashedFile, changed, content_digest
from threefold.data.text.source import (
    Document,
    Labeller,
    LossMask,
    Opening,
    Piece,
    ReadLog,
    Source,
)
from threefold.errors import DataError, Problem, ThreefoldError, first_line, shell_word
from threefold.jsonl import object_of

if TYPE_CHECKING:
    from datasets import Dataset

_PIECE_BYTES = 4 << 20
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubRows:
    """The text column of one split; `fingerprint` is of the rows' `files` and of the column's name."""

    name: str
    dataset: "Dataset"
    text_field: str
    fingerprint: str
    files: Mapping[Path, HashedFile]
    labeller: Labeller | None = None

    @property
    def loss_mask(self) -> LossMask | None:
        return self.labeller.loss_mask if self.labeller is not None else None

    def refuse_changed(self, pieces: Sequence[Piece]) -> None:
        """As `TextSource`; of all pieces alike."""
        for path, hashed in self.files.items():
            hashed.refuse_other(path)

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
                what = f"{self.name}, rows {start} to {stop - 1}: {first_line(error)}"
                log.bad(what, expected="undamaged rows", fix=AGAIN, count=stop - start)


def open_hub(asked: Opening) -> HubRows:
    """One split of `hf:ID`; a DataError if it cannot be read, or has no such split, configuration or field."""
    import datasets

    source = asked.source
    dataset_id = str(source.name).removeprefix("hf:")
    folder = expanded(dataset_id)
    if is_saved(folder):
        return open_saved(asked, folder)
    if dataset_id.startswith((".", "/", "~")) and not folder.is_dir():
        raise DataError(
            f"data.source = 'hf:{dataset_id}' is not a folder",
            expected=f"hf:OWNER/NAME as on the Hub, or hf:FOLDER, relative to {Path.cwd()}",
            fix="--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)",
        )
    if not folder.is_dir():
        return _rows_of(_loaded(source, dataset_id), asked)
    before = _hashed_below(
        folder, sorted(path for path in folder.rglob("*") if path.is_file()), asked.memory
    )
    place = (
        Path(datasets.config.HF_DATASETS_CACHE)
        / f"threefold-{_content(before, folder, str(folder.resolve()))}"
    )
    checked, place = place / "checked.json", place / "rows"
    checked.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(checked.with_suffix(".lock")):
        digests = (object_of(checked.read_bytes()) if checked.exists() else None) or {}
        if not digests:  # existing files are incomplete, or of other bytes
            shutil.rmtree(place, ignore_errors=True)
        dataset = _loaded(source, str(folder), cache_dir=str(place))
        identity = _content(before, folder, source.config_name, source.split)
        rows = _rows_of(dataset, asked, identity)
        for path, hashed in before.items() if not digests else ():
            hashed.refuse_other(path)
        for path, hashed in rows.files.items():
            if digests.setdefault(str(path), hashed.content) != hashed.content:
                raise changed(
                    path,
                    fix=f"rm -r {shell_word(checked.parent)}   (it is made again from {folder})",
                )
        checked.write_text(json.dumps(digests))
    return rows


def _loaded(source: Source, name: str, *, cache_dir: str | None = None) -> "Dataset":
    import datasets

    try:
        return datasets.load_dataset(
            name,
            cache_dir=cache_dir,
            name=source.config_name,
            split=source.split,
            revision=source.revision,
            keep_in_memory=False,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _not_loaded(source, error) from error


def _hashed_below(
    root: Path, paths: Iterable[Path], memory: Path | None
) -> dict[Path, HashedFile]:
    digests, hashed = Digests(root, memory), {}
    for path in paths:
        with contextlib.suppress(OSError):  # its reader names it
            hashed[path] = digests.of(path.relative_to(root).as_posix())
    digests.keep()
    return hashed


def _content(files: Mapping[Path, HashedFile], root: Path, *others: object) -> str:
    """Digest of files, by their paths below a root, sizes and contents, and of whatever else determines their rows."""
    whole = hashlib.blake2b(repr(others).encode(), digest_size=16)
    for path, hashed in files.items():
        whole.update(
            f"\n{path.relative_to(root).as_posix()}\0{hashed.content}".encode(
                errors="surrogateescape"
            )
        )
    return whole.hexdigest()


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote a folder."""
    return os.path.isfile(folder / "dataset_dict.json") or all(
        os.path.isfile(folder / name) for name in ("dataset_info.json", "state.json")
    )


def open_saved(asked: Opening, folder: Path) -> HubRows:
    """The rows of a folder of `save_to_disk`; of several splits the source's. As `open_hub`."""
    import datasets

    source = asked.source
    try:
        dataset = datasets.load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:
        # Errors of many classes: files that are missing, truncated, or of another version.
        raise DataError(
            f"data.source = {source.name!r} is a folder written by save_to_disk that cannot be read: "
            f"{first_line(error)}",
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
    return _rows_of(dataset, asked)


def _rows_of(dataset: "Dataset", asked: Opening, identity: str | None = None) -> HubRows:
    """The rows of a dataset; `identity` of its content, if that is not the bytes of its files."""
    source = asked.source
    name, text_field = str(source.name), source.text_field
    paths = [Path(each["filename"]) for each in dataset.cache_files]
    root = Path(os.path.commonpath([path.parent for path in paths] or [Path("/")]))
    files = _hashed_below(root, paths, asked.memory)
    # The files of a split are all of it, unless it is requested as `train[:10%]`.
    identity = identity or _content(
        files, root, len(dataset), source.split if "[" in source.split else ""
    )
    labeller = asked.labeller_for(dataset.column_names) if asked.labeller_for else None
    columns = [
        text_field if text_field in dataset.column_names else text_field.partition(".")[0]
    ]
    if labeller is None:
        require_text(name, dataset.features.arrow_schema, text_field)
    else:
        columns = [name for name in labeller.columns if name in dataset.column_names]
    recipe = f"hub 2 {identity} {repr(text_field) if labeller is None else labeller.recipe}"
    fingerprint = content_digest(recipe)
    rows = dataset.select_columns(columns).with_format("arrow")
    return HubRows(name, rows, text_field, fingerprint, files, labeller)


def _not_loaded(source: Source, error: Exception) -> ThreefoldError:
    """The user's error for an error of `load_dataset`: the first case whose class, or word of the text, fits."""
    import datasets

    # A generation error only reports where it happened; its cause is the problem with the file.
    cause = (
        error.__cause__
        if isinstance(error, datasets.exceptions.DatasetGenerationError)
        else error
    )
    reason = first_line(cause)
    name, dataset_id = f"data.source = {source.name!r}", str(source.name).removeprefix("hf:")
    again = f"--data.source {dataset_id}   (reads the files of a folder directly, and names the line)"
    if not expanded(dataset_id).is_dir():
        again = f"--data.revision COMMIT   (one before the damage), or report it at hf.co/datasets/{dataset_id}"
    cases: list[tuple[type[Exception] | str, str, str, str]] = [
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
    fits = (
        sign in reason if isinstance(sign, str) else isinstance(error, sign)
        for sign, *_ in cases
    )
    return DataError.of([Problem(*next(itertools.compress(cases, fits))[1:])])
