"""DeepSpeed's universal checkpoints: a folder for each weight, with its values in float32 and AdamW's moments in files.

`ds_to_universal` makes them from a ZeRO checkpoint, whose own files only DeepSpeed can open: they are pickles of its
classes. Files are read with `weights_only`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.checkpoint.tensors import TYPE_NAMES
from threefold.convert.dcp_reader import TensorFormat
from threefold.errors import CheckpointError, first_line, shell_word

_EXPECTED = "a folder as deepspeed.checkpoint.ds_to_universal writes it: zero/NAME/fp32.pt and the moments beside it"


@dataclass(frozen=True)
class Universal:
    """A universal checkpoint.

    Attributes:
        files: of each tensor, by the names that `convert.names` knows: NAME, and optimizer.exp_avg.NAME.
        shapes: of the weights, which ZeRO 3 keeps as vectors.
        step: updates that were made; ZeRO 3 has no file of them for each weight.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    step: int
    others: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> Mapping[str, TensorFormat]:
        # Of files that are mapped, not read.
        tensors = {name: self.read(name) for name in self.files}
        return {
            name: TensorFormat(TYPE_NAMES[each.dtype], tuple(each.shape))
            for name, each in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        path = self.files[name]
        if path.name == "step.pt" and not path.exists():
            return torch.tensor(float(self.step))
        content = _load(path)
        values = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(values, Tensor) or values.dtype not in TYPE_NAMES:
            raise _unreadable(path, "it holds no tensor")
        shape = torch.Size(self.shapes.get(path.parent.name, ()))
        flat = values.ndim == 1 and values.numel() == shape.numel()
        return (
            values.detach().reshape(shape)
            if flat and path.name != "step.pt"
            else values.detach()
        )


def open_universal(folder: Path) -> Universal | None:
    """The universal checkpoint in a folder, or the newest that DeepSpeed has named there; None if it holds none.

    Raises:
        CheckpointError: a file cannot be read, or the folder is a checkpoint of ZeRO as DeepSpeed saves it.
    """
    for pointer in ("latest_universal", "latest"):
        if (folder / pointer).is_file():
            folder /= Path((folder / pointer).read_text(encoding="utf-8").strip()).name
            break
    weights = sorted(path.parent for path in folder.glob("zero/*/fp32.pt"))
    if not weights and any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        made = shell_word(f"{folder}-universal")
        convert = (
            f"--inject_missing_state --input_folder {shell_word(folder)} --output_folder {made}"
        )
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed's ZeRO: pickles of DeepSpeed's own classes",
            expected="a universal checkpoint, which DeepSpeed makes of it",
            fix=f"python -m deepspeed.checkpoint.ds_to_universal {convert}; threefold import {made}",
        )
    heads = sorted(folder.glob("*_model_states.pt"))
    if not weights or not heads:
        return None
    try:
        head = _load(heads[0])
        step = int(head["global_steps"]) - int(head["skipped_steps"])
        shapes = {
            name: tuple(map(int, shape))
            for group in head["param_shapes"]
            for name, shape in group.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(heads[0], f"{type(error).__name__}: {error}") from error
    files = {each.name: each / "fp32.pt" for each in weights}
    for each in weights:
        held = [
            moment for moment in ("exp_avg", "exp_avg_sq") if (each / f"{moment}.pt").exists()
        ]
        for moment in (*held, "step") if held else ():
            files[f"optimizer.{moment}.{each.name}"] = each / f"{moment}.pt"
    return Universal(files, shapes, step)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load has no specific error class
        raise _unreadable(path, first_line(error)[:200]) from error


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {reason}",
        expected=_EXPECTED,
        fix="make it again, or copy it again",
    )
