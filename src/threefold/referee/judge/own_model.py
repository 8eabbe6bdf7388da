"""The model that a program trains, rebuilt in this process: the gradients that recorded ones must be made of.

A model of transformers whose attention or loss is the program's is called with a mask and labels of unknown meaning.
Its gradients are tried under each reading: one under which they are made of those of its rows is the program's. If
there is none, nothing is known to be wrong.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from threefold.referee.judge.checked_steps import CheckedStep, TrainedRows
from threefold.referee.judge.parts import Refuted, Unjudgeable
from threefold.referee.rank.rows import Tensors
from threefold.referee.rank.sealed import Values

_NOT_INPUTS = ("labels", "shift_labels", "num_items_in_batch")


def model_class(architecture: Values) -> tuple[Any, Any]:
    """The class of transformers that a program's model has, and that of its config.

    Raises:
        Unjudgeable: it is not a model of transformers.
    """
    if why := architecture.get("unknown"):
        raise Unjudgeable(why)
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = architecture["config"].get("model_type")
    kind: Any = getattr(transformers, architecture["class"], None)
    is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
    if model_type not in CONFIG_MAPPING or not is_model:
        raise Unjudgeable(
            f"transformers {transformers.__version__} has no {architecture['class']}"
        )
    return kind, CONFIG_MAPPING[model_type]


def rebuilt(architecture: Values) -> nn.Module:
    """A model of transformers, from its recorded config, in float32 on the CPU.

    Raises:
        Unjudgeable: it is no such model, or computes what cannot be taken apart.
    """
    kind, own_config = model_class(architecture)
    values = architecture["config"]
    if values.get("output_router_logits"):
        raise Unjudgeable("the loss has a router term besides the targets")
    config = own_config.from_dict(values)
    config._attn_implementation = "eager" if architecture["attention"] == "eager" else "sdpa"
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = kind(config)
    return model.float().train()


class OwnModel:
    """A model with recorded weights.

    Args:
        replaced: the program's own function that computes its loss from labels, if there is one.
    """

    def __init__(self, model: nn.Module, *, replaced: str | None = None) -> None:
        self.model = model
        self._replaced = replaced
        self._is_sharded = any(
            hasattr(parameter, "placements") for parameter in model.parameters()
        )

    def load(self, weights: Tensors) -> None:
        """Takes the weights that were recorded.

        Raises:
            Unjudgeable: they are not those of this model.
            Refuted: the program holds a separate weight where the model shares one.
        """
        own = dict(self.model.named_parameters())
        if untied := sorted((weights.keys() - own.keys()) & self.model.state_dict().keys()):
            raise Refuted(
                f"{untied[0]} is a separate weight in the program, but the model ties it to another",
                "one weight, with the gradients of all its uses",
                "what replaces parameters after the model is made: sharding, a cast, a load, a resized vocabulary",
            )
        shapes = [
            {(name, each.shape) for name, each in held.items()} for held in (own, weights)
        ]
        if different := shapes[0] ^ shapes[1]:
            raise Unjudgeable(
                f"{min(different)[0]} of the recorded weights does not match {type(self.model).__name__}"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                _local(parameter).copy_(weights[name])

    def num_targets(self, unit: TrainedRows) -> int:
        """How many targets a unit trains on."""
        if unit.targets is not None:
            return int((unit.targets != -100).sum())
        labels = unit.inputs.get("labels")
        if labels is None or not unit.has_own_loss:
            raise Unjudgeable(
                "the loss is computed outside the model, and is not its outputs' cross-entropy"
            )
        if self._replaced is not None:
            raise Unjudgeable(
                f"the loss is computed by {self._replaced}, which may interpret labels differently"
            )
        if labels.ndim < 2:
            return labels.numel()
        return int((labels[:, 1:] if self._shifts else labels).ne(-100).sum())

    def num_labels(self, unit: TrainedRows) -> int:
        """How many labels the rows have: of the first token too, which is no target."""
        labels = unit.inputs.get("labels")
        if labels is None or labels.ndim < 2:
            return self.num_targets(unit)
        return int((labels != -100).sum())

    @property
    def _shifts(self) -> bool:
        kind = getattr(self.model, "loss_type", None)
        is_causal = kind in (None, "ForCausalLM", "ForConditionalGeneration")
        return is_causal and not self._has_decoder

    @property
    def _has_decoder(self) -> bool:
        """Whether labels are also what a decoder reads."""
        config: Any = getattr(self.model, "config", None)
        return getattr(config, "is_encoder_decoder", False)

    def gradients(
        self,
        losses: list[tuple[TrainedRows, float]],
        names: list[str],
        *,
        low: torch.dtype | None = None,
    ) -> list[Tensor]:
        """The gradient of `sum(coefficient * loss of the unit)`; a unit's loss is the sum over its targets.

        Args:
            low: compute in this type, as autocast does.
        """
        wanted = [*map(self.model.get_parameter, names)]
        total = [
            torch.zeros_like(_local(parameter), dtype=torch.float32) for parameter in wanted
        ]
        for unit, coefficient in losses:
            with (
                torch.random.fork_rng(devices=[]),
                torch.autocast("cpu", dtype=low, enabled=low is not None),
            ):
                if unit.random is not None:
                    torch.set_rng_state(unit.random)
                loss = self._loss(unit) * coefficient
            for into, gradient in zip(total, self._backward(loss, wanted), strict=True):
                if gradient is not None:
                    into += gradient
        return total

    def _backward(self, loss: Tensor, wanted: list[nn.Parameter]) -> list[Tensor | None]:
        if not self._is_sharded:
            return list(torch.autograd.grad(loss, wanted, allow_unused=True))
        # Hooks of sharding deliver gradients only in a whole backward.
        loss.backward()
        gradients = [None if each.grad is None else _local(each.grad) for each in wanted]
        self.model.zero_grad()
        return gradients

    def _loss(self, unit: TrainedRows) -> Tensor:
        inputs = dict(self._named(unit.inputs))
        if unit.targets is None:
            loss: Tensor = self.model(**inputs).loss
            return loss * self.num_targets(unit)
        left_out = _NOT_INPUTS[1:] if self._has_decoder else _NOT_INPUTS
        inputs = {name: value for name, value in inputs.items() if name not in left_out}
        output = self.model(**inputs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        if unit.targets.ndim > 1:
            logits = logits[:, -unit.targets.shape[1] :]
        losses = nn.functional.cross_entropy(
            logits.float().flatten(0, -2),
            unit.targets.flatten().long(),
            ignore_index=-100,
            reduction="none",
        )
        return (losses * unit.shares).sum()

    def _named(self, inputs: Tensors) -> Iterator[tuple[str, Any]]:
        places = list(inspect.signature(self.model.forward).parameters)
        for name, value in inputs.items():
            if "." in name:
                raise Unjudgeable(f"the model is called with {name}, inside another value")
            if name != "num_items_in_batch":
                yield (places[int(name)] if name.isdigit() else name), value


def _local(tensor: Any) -> Tensor:
    """The values of a tensor that one process holds."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local.detach()


# Threefold's own: labels are those of their places, and documents are distinguished by their positions.
_KNOWN = "threefold"


def read_as(step: CheckedStep, labels_are_targets: bool, leaves_out_mask: bool) -> CheckedStep:
    """A step as a program may mean it.

    Args:
        labels_are_targets: a label is what its own place predicts; else the next place's, as in transformers.
        leaves_out_mask: the mask adds nothing to the positions.
    """

    def read(unit: TrainedRows) -> TrainedRows:
        unit = unit.without("attention_mask") if leaves_out_mask else unit
        if labels_are_targets and unit.has_own_loss:
            unit = replace(unit, targets=unit.inputs.get("labels", unit.targets))
        return unit

    return replace(step, units=[*map(read, step.units)])


def foreign_part(architecture: Values) -> str | None:
    """The program's own part of a transformers model; None: nothing, or only known parts."""
    attention = architecture.get("attention", "sdpa")
    if attention not in ("eager", "sdpa", "flex_attention") and not attention.startswith(
        ("flash_attention", _KNOWN)
    ):
        return f"its attention is the program's own ({attention}): what its mask means is not known"
    if (loss := architecture.get("replaced")) and not loss.startswith(_KNOWN):
        return f"the loss is computed by {loss}, which may interpret labels differently"
    return None


def readings_of(architecture: Values) -> list[tuple[bool, bool]]:
    """Possible readings of a model's steps, for `read_as`: that of transformers first."""
    if foreign_part(architecture) is None:
        is_known = (architecture.get("replaced") or "").startswith(_KNOWN)
        return [(is_known, is_known)]
    return list(product((False, True), (False, True)))
