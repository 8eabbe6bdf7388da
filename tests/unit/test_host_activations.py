"""Inputs of checkpointed layers on the host: which tensors travel, in which order, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from threefold.model.activation_offload import Copies, HostActivations

LAYERS = 4


class Told(Copies):
    """Notes what travels: (direction, number of the tensor)."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[tuple[str, int]] = []
        self.sent: list[Tensor] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        self.sent.append(super().to_host(tensor))
        self.log.append(("out", len(self.sent) - 1))
        return self.sent[-1]

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        number = next(number for number, each in enumerate(self.sent) if each is host)
        self.log.append(("back", number))
        return super().to_device(host)[0], number

    def arrived(self, tensor: Tensor, mark: Any) -> Tensor:
        self.log.append(("used", mark))
        return tensor


def gradients(again: Any, *, passes: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.GELU())
        for _ in range(LAYERS)
    ]
    mask = torch.ones(3, 6)
    for number in range(passes):
        torch.manual_seed(7 + number)
        hidden = torch.randn(3, 6, requires_grad=True)
        for layer in layers:
            hidden = again(
                lambda states, mask, layer=layer: layer(states * mask) + states, hidden, mask
            )
        hidden.square().sum().backward()
    return [
        each.grad for layer in layers for each in layer.parameters() if each.grad is not None
    ]


def full(layer: Any, *inputs: Any) -> Any:
    return checkpoint(layer, *inputs, use_reentrant=False)


@pytest.mark.parametrize("passes", [1, 2])
def test_bits_are_those_of_full_checkpointing(passes: int) -> None:
    host = HostActivations(torch.device("cpu"), Told())
    found, expected = gradients(host.checkpoint, passes=passes), gradients(full, passes=passes)
    assert len(found) == 2 * LAYERS
    assert all(map(torch.equal, found, expected))


def test_one_layer_is_fetched_ahead_of_its_turn() -> None:
    told = Told()
    gradients(HostActivations(torch.device("cpu"), told).checkpoint)
    out = [("out", number) for number in range(LAYERS)]
    back = [
        ("back", 3),
        ("back", 2),
        ("used", 3),
        ("back", 1),
        ("used", 2),
        ("back", 0),
        ("used", 1),
        ("used", 0),
    ]
    assert told.log == out + back


def test_second_pass_asks_for_nothing_of_the_first() -> None:
    told = Told()
    gradients(HostActivations(torch.device("cpu"), told).checkpoint, passes=2)
    assert [number for what, number in told.log if what == "back"] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_what_needs_no_gradient_stays() -> None:
    """Masks and positions are given to every layer: a copy for each would be more than the hidden states."""
    told = Told()
    gradients(HostActivations(torch.device("cpu"), told).checkpoint)
    assert (
        all(not torch.equal(each, torch.ones(3, 6)) for each in told.sent)
        and len(told.sent) == LAYERS
    )


def test_tensors_of_another_device_stay() -> None:
    told = Told()
    gradients(HostActivations(torch.device("meta"), told).checkpoint)
    assert told.log == []


def test_nothing_travels_without_gradients() -> None:
    told = Told()
    with torch.no_grad():
        HostActivations(torch.device("cpu"), told).checkpoint(
            torch.nn.Linear(6, 6), torch.randn(3, 6)
        )
    assert told.log == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_a_model_send_their_inputs(dtype: str) -> None:
    from ranks.reference import TINY_LLAMA, make_batches
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.training.step import TrainStep

    mesh, curves = init_mesh(device="cpu"), {}
    sent: list[torch.Size] = []
    plain = Copies.to_host
    Copies.to_host = lambda self, tensor: (sent.append(tensor.shape), plain(self, tensor))[1]  # type: ignore[method-assign]
    try:
        for kind in ("full", "offload"):
            asked = {
                "model": {"config": TINY_LLAMA, "dtype": dtype},
                "train": {"activation_checkpointing": kind},
            }
            config = validate(asked)
            step = TrainStep(
                build(config, load.read_config(config.model), mesh), lr=1e-3, micro_batch=2
            )
            curves[kind] = [step(batch) for batch in make_batches(steps=3, rows=4, seq_len=16)]
    finally:
        Copies.to_host = plain  # type: ignore[method-assign]
        mesh.close()
    assert curves["offload"] == curves["full"]
    assert sent == [torch.Size([2, 16, 32])] * (2 * 2 * 3)  # layers, micro-batches, steps
