"""Exports a checkpoint in the native format of torch.distributed.checkpoint (DCP), in one process.

`model.NAME` are the weights; `optimizer.exp_avg.NAME` and so on, if they are asked for, the moments, as in a run's own
checkpoint. Tensors are read one at a time, when DCP writes them.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from threefold.checkpoint.layout import damaged, find
from threefold.checkpoint.shards import Index
from threefold.checkpoint.tensors import TYPE_NAMES, read_whole
from threefold.convert.dcp_reader import open_dcp
from threefold.errors import ConfigError, RunError


@dataclass(frozen=True)
class ExportedDcp:
    """The result: the checkpoint's step, the number of tensors, and the result of reading them again."""

    step: int
    num_tensors: int
    verified: str


def export_dcp(run: Path, to: Path, *, optimizer: bool = False) -> ExportedDcp:
    """Writes the checkpoint of a run to a new folder, reads it again, and removes the folder on failure.

    Args:
        optimizer: the optimizer's state too.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged. ConfigError: the folder is not empty.
        RunError: what was written is not what was read.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not empty", expected="a new or empty folder", fix="--to ANOTHER_FOLDER")
    checkpoint = find(run)
    if (reason := checkpoint.damage()) is not None:
        raise damaged(checkpoint, reason)
    index = Index.read(checkpoint.state)
    kinds = ("model.", "optimizer.") if optimizer else ("model.",)
    names = [name for name in index.entries if name.startswith(kinds)]
    made = not to.exists()
    try:
        _save(checkpoint.state, index, names, to)
        written = open_dcp(to)
        for name in names:
            if not torch.equal(_bits(written.read(name)), _bits(read_whole(checkpoint.state, index.entries[name]))):
                raise RunError(
                    f"{name} in {to} is not what {checkpoint.path} has",
                    expected="equal bits",
                    fix="check the disk, and export again",
                )
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        if not made:
            to.mkdir()
        raise
    return ExportedDcp(checkpoint.step, len(names), "read again: equal bits")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _save(state: Path, index: Index, names: list[str], to: Path) -> None:
    class Planner(DefaultSavePlanner):
        """Reads a tensor when its turn to be written has come."""

        def lookup_object(self, index_of: Any) -> Any:
            return read_whole(state, index.entries[index_of.fqn])

        def resolve_data(self, write_item: WriteItem) -> Any:
            return self.lookup_object(write_item.index).detach()

    types = {name: dtype for dtype, name in TYPE_NAMES.items()}
    outlines = {
        name: torch.empty(index.entries[name].shape, dtype=types[index.entries[name].dtype], device="meta")
        for name in names
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        save(outlines, storage_writer=FileSystemWriter(to), planner=Planner(), no_dist=True)
