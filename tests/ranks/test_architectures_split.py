"""Real ranks, kinds of architecture that depend on where a token stands: the step is transformers' own, alone."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.reference import compare_gradients, require
from ranks.spawn import run_ranks
from threefold.check.compare import LOSS, Difference, compare_number

pytestmark = pytest.mark.ranks

# Positions that are numbered, or counted from the padding's number; chunks; two sets of factors; one key for all heads.
CP = ("bart", "roberta", "llama4", "phi3", "gpt_bigcode")
# Documents that run alone through layers that are split or sharded, and attention that is the model's own.
TP = ("qwen3_next", "nemotron_h", "deepseek_v32")
SHARDED = ("falcon_h1", "mamba2", "rwkv", "bloom")
# A sink for each head, of which a cp rank then has some.
BY_HEADS = ("gpt_oss",)
# Others of the same kinds.
MORE = {
    "cp": ("llama", "whisper", "gemma3"),
    "tp": ("granitemoehybrid", "lfm2_moe"),
    "dp_shard": ("qwen3_next", "hy_v4"),
}


def _compared(names: tuple[str, ...], axis: str) -> dict[str, list[Difference]]:
    """For each (architecture, mask) the loss and the gradients, compared."""
    import torch

    from threefold.check.compare import complete_gradients
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss
    from unit.test_architectures_alone import rows, small, theirs

    sizes = {"dp_shard": {"dp": 2, "dp_shard": 2}, "tp": {"tp": 2}}.get(axis, {"cp": 2})
    mesh = init_mesh(**sizes, device="cpu")
    method = "ulysses" if axis == "cp by heads" else "auto"
    compared = {}
    for name in names:
        asked: dict[str, Any] = {
            "model": {"config": {"model_type": name}},
            "data": {"seq_len": 32},
            "mesh": {"cp_method": method},
        }
        config, architecture = validate(asked), small(name)
        for mask in ("causal", "documents"):
            model = build(config, architecture, mesh)
            model.module.eval()
            batch = rows(mask, architecture)
            own = (
                batch
                if axis != "dp_shard"
                else {key: each[mesh.dp_rank :: 2] for key, each in batch.items()}
            )
            gradients: dict[str, torch.Tensor] = {}

            def observe(
                model: Any = model, gradients: dict[str, torch.Tensor] = gradients
            ) -> None:
                gradients.update(
                    (each, whole.clone()) for each, whole in complete_gradients(model)
                )

            step = TrainStep(
                model,
                build_optimizer(model.module, config.optimizer),
                grad_clip=0.0,
                observe=observe,
            )
            loss = mean_loss(step.run([own], lr=0.0), mesh)
            alone = load.whole(
                config.model, architecture, seed=config.train.seed, dtype=torch.float32
            ).eval()
            expected_loss, expected = theirs(alone, batch)
            compared[f"{name}, {mask}"] = [
                compare_number(LOSS, loss, expected_loss),
                *compare_gradients(gradients, expected),
            ]
    mesh.close()
    return compared


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        *(("cp", CP), ("cp by heads", BY_HEADS), ("tp", TP), ("dp_shard", SHARDED)),
        *(pytest.param(axis, names, marks=pytest.mark.long) for axis, names in MORE.items()),
    ],
    ids=["cp", "cp by heads", "tp", "dp_shard", "more cp", "more tp", "more dp_shard"],
)
def test_ranks_compute_what_one_process_does(axis: str, names: tuple[str, ...]) -> None:
    for case, differences in run_ranks(_compared, 2, names, axis)[0].items():
        require(differences, case)
