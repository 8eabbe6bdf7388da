"""AdamW of float32 weights that writes their bfloat16 copies too: clipping, update and copy in one pass.

For each number it reads gradient, weight and moments, and writes weight, moments and copy: on CUDA in one Triton kernel
for all parameters of a group, elsewhere by torch operations. Both round in the same order, so that they agree to the
bit; no rounding depends on a number's neighbours.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from threefold.model.working_copy import WorkingCopy
from threefold.optim.eightbit import adamw_8bit
from threefold.optim.fused_update import Factors, Tensors, update_by_operations


class FusedAdamW(torch.optim.AdamW):
    """AdamW over the float32 weights of a model with a working copy.

    Attributes:
        clip_factor: by which the next step multiplies gradients, a scalar on any device; None: 1.
        found_inf: as of torch's fused kernels: where it is 1, a step changes nothing.
    """

    def __init__(
        self, params: Any, *, working: WorkingCopy, moments: torch.dtype, **settings: Any
    ) -> None:
        """Args: `moments`: their type, float32, bfloat16, or uint8 for torchao's; `settings`: of torch's AdamW."""
        super().__init__(params, **settings)
        self._working, self._moments = working, moments
        self._step_supports_amp_scaling = True
        self.clip_factor: Tensor | None = None
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters that have a gradient; waits for no device."""
        for group in self.param_groups:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for each in group["params"]:
                if each.grad is not None:
                    # Small ones are not in 8 bits.
                    moments = type(self._state_of(each)["exp_avg"])
                    kinds.setdefault(
                        (each.grad.dtype, self._working.copy_of(each) is None, moments), []
                    ).append(each)
            for parameters in kinds.values():
                self._update(parameters, group)
                self._working.note_written(parameters)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        device = parameters[0].device
        states = [self._state_of(each) for each in parameters]
        scalars = ((self.clip_factor, 1.0), (self.found_inf, 0.0))
        clip, skip = (
            torch.full((), default, device=device) if own is None else own.to(device)
            for own, default in scalars
        )
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [1 - skip] * len(steps))
        (beta, beta_square), number = group["betas"], torch.stack(steps).double()
        rates = -group["lr"] / (1 - beta**number)
        root_scales = 1 / (1 - beta_square**number).sqrt()
        factors = Factors(rates.float(), root_scales.float(), clip, skip)
        of_each = [
            Tensors(
                each,
                _like(each.grad, each),
                state["exp_avg"],
                state["exp_avg_sq"],
                self._working.copy_of(each),
            )
            for each, state in zip(parameters, states, strict=True)
        ]
        _kernel(device)(of_each, factors, group)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            if self._moments == torch.uint8:
                if name not in state:
                    theirs: Any = adamw_8bit()([parameter])
                    state[name] = theirs._new_buffer(parameter, name == "exp_avg")  # signed
            elif name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self._moments)
            elif state[name].dtype != self._moments:
                # Torch's `load_state_dict` gives them the weight's.
                state[name] = state[name].to(self._moments)
        return state


def can_step_on(device: torch.device) -> bool:
    """Whether what it needs is installed: triton, on CUDA."""
    return device.type == "cpu" or (
        device.type == "cuda" and importlib.util.find_spec("triton") is not None
    )


def _kernel(
    device: torch.device,
) -> Callable[[Sequence[Tensors], Factors, dict[str, Any]], None]:
    if device.type != "cuda":
        return update_by_operations
    from threefold.optim.fused_kernel import update_by_kernel

    return update_by_kernel


def _like(gradient: Tensor | None, weight: Tensor) -> Tensor:
    """The gradient in the layout of its weight, which is nearly always the one that it has."""
    assert gradient is not None
    same = gradient.stride() == weight.stride()
    return gradient if same else torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
