"""One hash of a model's weights, which depends on the weights alone: not on the mesh, the files or their order.

It is the SHA-256 of one line for each tensor, sorted: its name, type and shape and the SHA-256 of its numbers. A
checkpoint's tensors are taken under the names and in the layouts that its export has, so both have the same hash.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from threefold.checkpoint import state as run_state
from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.checkpoint.tensors import TYPE_NAMES, bytes_of
from threefold.errors import CheckpointError
from threefold.export.model_folder import described
from threefold.export.weights import converted, model_with_adapters, peft_weights
from threefold.model.load import outline


@dataclass(frozen=True)
class WeightsHash:
    """A hash, with the number of tensors and numbers that it covers."""

    sha256: str
    num_tensors: int
    num_parameters: int


def hash_of(tensors: Iterable[tuple[str, Tensor]]) -> WeightsHash:
    """The hash of named tensors, one at a time in memory, in any order.

    Raises:
        CheckpointError: there are none.
    """
    lines, numbers = list[str](), 0
    for name, tensor in tensors:
        own = hashlib.sha256(bytes_of(tensor.detach().contiguous())).hexdigest()
        lines.append(f"{name} {TYPE_NAMES[tensor.dtype]} {list(tensor.shape)} {own}\n")
        numbers += tensor.numel()
    if not lines:
        # Two models without weights would be equal.
        raise CheckpointError(
            "no tensor to hash", expected="a model's weights", fix="export or download it again"
        )
    return WeightsHash(
        hashlib.sha256("".join(sorted(lines)).encode()).hexdigest(), len(lines), numbers
    )


def hash_of_checkpoint(
    checkpoint: Checkpoint, *, ema: bool = False, trust_remote_code: bool = False
) -> WeightsHash:
    """The hash of a checkpoint's weights; of adapters alone if it has no more.

    Raises:
        CheckpointError: its bytes are not those that were written, or it cannot be read.
    """
    checkpoint.refuse_damage()
    index = run_state.index_of(checkpoint, ema=ema)
    config, architecture = described(checkpoint, trust_remote_code)
    if config.model.lora.r:
        return hash_of(
            peft_weights(model_with_adapters(checkpoint, config, architecture, index)).items()
        )
    model = outline(architecture, config.model)
    held = run_state.model_state(model)
    run_state.fit(held, index)
    names = [name.removeprefix("model.") for name in held]
    return hash_of(
        converted(
            checkpoint.state, index, names, lambda layer: revert_weight_conversion(model, layer)
        )
    )


def hash_of_folder(folder: Path) -> WeightsHash:
    """The hash of the weights in a folder's files (model*.safetensors, or an adapter's).

    Raises:
        CheckpointError: there are none, one is missing or cannot be read, or a tensor is in two files.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(
        folder.glob("adapter_model.safetensors")
    )
    if not files:
        raise CheckpointError(
            f"{folder} holds neither a run's checkpoints nor a model's weights",
            expected="a run's folder, one of its checkpoints, or a folder with model.safetensors",
            fix="threefold hash runs/NAME",
        )
    # model-00001-of-00003: the name of one tells how many there are.
    number = files[0].stem.rpartition("-of-")[2]
    if number.isdigit() and int(number) > len(files):
        raise CheckpointError(
            f"{folder} has {len(files)} of {int(number)} weights files",
            expected="whole weights: two halves may be equal",
            fix="export or download it again",
        )
    return hash_of(_read(files))


def _read(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    seen: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118  (it is no mapping)
                    if name in seen:
                        expected, fix = (
                            "each tensor once",
                            "leave the files of another export out of the folder",
                        )
                        raise CheckpointError(
                            f"{file}: {name} is in another file too", expected=expected, fix=fix
                        )
                    seen.add(name)
                    yield name, held.get_tensor(name)
        except SafetensorError as error:
            expected, fix = "whole safetensors files", "export or download it again"
            raise CheckpointError(
                f"{file} cannot be read: {error}", expected=expected, fix=fix
            ) from error
