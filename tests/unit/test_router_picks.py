"""The picks that a step counts beforehand are those of its own forwards, whatever those draw at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from threefold.mesh.mesh import init_mesh
from threefold.run.load_model import load_model
from threefold.training.loss import RouterLoss
from threefold.training.step import TrainStep

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize(
    "noise",
    [{"attention_dropout": 0.5}, {"router_jitter_noise": 0.5}],
    ids=lambda each: next(iter(each)),
)
def test_picks_are_those_of_the_forwards_that_are_trained(
    noise: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_mesh(device="cpu")
    model = load_model(config={**MIXTRAL, **noise}, mesh=mesh)
    step = TrainStep(model, micro_batch=1)
    given: list[Tensor] = []
    found: list[Tensor] = []
    share = RouterLoss.share

    def kept(
        self: RouterLoss, router_logits: tuple[Tensor, ...], picks: Tensor, counted: Tensor
    ) -> Tensor:
        given.append(picks)
        found.append(self.picks(router_logits, counted))
        return share(self, router_logits, picks, counted)

    monkeypatch.setattr(RouterLoss, "share", kept)
    tokens = torch.randint(64, (3, 17), generator=torch.Generator().manual_seed(0))
    step({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    assert len(found) == 3
    assert torch.equal(torch.stack(found).sum(0), given[0])
    mesh.close()
