"""The short last step of a run: the same loss and gradient norm on every mesh, divided by its own number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.runs import CONFIG, command, curve

pytestmark = pytest.mark.ranks

ROWS, EPOCHS = 43, 3
RUN = ("train", "plain.yaml", "--mesh.device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 43 rows."""
    folder = tmp_path_factory.mktemp("short")
    words = " ".join(f"word{number * number % 97}" for number in range(400))
    (folder / "corpus.txt").write_text(words[: ROWS * 32])
    config = CONFIG.replace("source: corpus", "source: corpus.txt").replace(
        "steps: 12", "epochs: 3"
    )
    (folder / "plain.yaml").write_text(config + "optimizer: {warmup_steps: 2}\n")
    # The routers' loss counts the tokens of real rows only.
    experts = "{model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 2, output_router_logits: true,"
    (folder / "routers.yaml").write_text(
        (folder / "plain.yaml").read_text().replace("{model_type: llama,", experts)
    )
    return folder


MESHES = {
    "alone": ("--mesh.dp", "1"),
    "sharded": ("--mesh.dp", "4", "--mesh.dp_shard", "4"),
    "context": ("--mesh.dp", "2", "--mesh.cp", "2", "--train.micro_batch", "1"),
}
"""The last step of 8 has one row, so all dp ranks but one have none."""


def test_short_step_is_divided_by_its_own_count_on_every_mesh(folder: Path) -> None:
    """With a rate of next to nothing, the steps' losses are means over parts of what one large batch is the mean of."""
    still = (*RUN, "--optimizer.lr", "1e-30", "--mesh.dp", "1")
    for name, batch in (("whole", "129"), ("parts", "8")):
        done = command(folder, *still, "--log.dir", name, "--train.global_batch", batch)
        assert done.returncode == 0, done.stderr
    (whole,) = [loss for loss, _ in curve(folder / "whole")]
    *full, short = [loss for loss, _ in curve(folder / "parts")]
    assert len(full) == 16
    assert (8 * sum(full) + short) / (ROWS * EPOCHS) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "meshes"), [("plain.yaml", [*MESHES]), ("routers.yaml", ["alone", "sharded"])]
)
def test_short_step_is_the_same_on_every_mesh(
    folder: Path, config: str, meshes: list[str]
) -> None:
    for mesh in meshes:
        done = command(
            folder, "train", config, *RUN[2:], *MESHES[mesh], "--log.dir", f"{mesh}-{config}"
        )
        assert done.returncode == 0, done.stderr
        assert "\nread: 129 rows, 3.00 epochs of 43; none is left\n" in done.stdout
        assert (
            command(folder, "data", "audit", f"{mesh}-{config}", "--contents").returncode == 0
        )
        for found, alone in zip(
            curve(folder / f"{mesh}-{config}"), curve(folder / f"alone-{config}"), strict=True
        ):
            assert found == pytest.approx(alone, rel=1e-4)
