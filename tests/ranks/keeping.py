"""A run in miniature inside test ranks: the real model, loader, step and checkpoints, without the command."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPUS = " ".join(f"word{(index * index + 7) % 97}" for index in range(1500))
LLAMA: dict[str, Any] = {
    **{
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
    },
}
Sizes = tuple[int, int, int, int]


class Miniature:
    """One rank of a run in `folder`, ready to step.

    Args:
        values: sections of the config that differ from the usual ones.
        background: checkpoints are written while the next steps run; else at once, as a run's last one is.
        evaluation: the fingerprint of the evaluated rows.
        seed: of the weights that the model has before anything is resumed.
    """

    def __init__(
        self,
        sizes: Sizes,
        folder: str,
        *,
        micro_batch: int = 2,
        background: bool = True,
        evaluation: str | None = None,
        **values: Any,
    ) -> None:
        from threefold.checkpoint.lineage import Author
        from threefold.config.loading import validate
        from threefold.mesh.mesh import init_mesh
        from threefold.model import load
        from threefold.model.build import build
        from threefold.optim.build import build_optimizer
        from threefold.optim.ema import Ema
        from threefold.run import assemble, request
        from threefold.run.checkpointer import Checkpointer, undamaged
        from threefold.run.folder import RunFolder, open_run
        from threefold.training.forward import warm_up_buckets
        from threefold.training.step import TrainStep

        logging.getLogger("threefold").addHandler(logging.NullHandler())
        replicate, shard, cp, tp = sizes
        self.mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
        self.config = validate(
            {
                "model": {"config": LLAMA, **values.get("model", {})},
                "data": {
                    "source": str(Path(folder).parent / "corpus.txt"),
                    "seq_len": 16,
                    **values.get("data", {}),
                },
                "train": {"global_batch": 8, **values.get("train", {})},
                "optimizer": {"lr": 3e-3, **values.get("optimizer", {})},
                "checkpoint": {"every": 1, "keep": 9, **values.get("checkpoint", {})},
                "log": {"dir": folder},
                "mesh": values.get("mesh", {}),
            }
        )
        tokenizer = request.tokenizer_of(self.config)
        architecture = load.read_config(self.config.model, vocab_size=tokenizer.vocab_size)
        opened = self.mesh.share("open", lambda: open_run(self.config).to_values())
        folder_of_run = undamaged(RunFolder.from_values(opened), self.mesh)
        begun = self.mesh.share("identity", lambda: dataclasses.asdict(folder_of_run.begin()))
        self.folder = dataclasses.replace(folder_of_run, author=Author(**begun))
        self.loader = assemble.loader_of(
            self.config, assemble.rows_of(self.config, tokenizer, self.mesh), self.mesh
        )
        self.model = build(self.config, architecture, self.mesh)
        self.optimizer = build_optimizer(self.model.module, self.config.optimizer, self.mesh)
        decay = self.config.optimizer.ema
        self.ema = Ema(self.model.module, decay) if decay is not None else None
        self.step = TrainStep(self.model, self.optimizer, grad_clip=1.0, ema=self.ema)
        self.checkpointer = Checkpointer(
            *(
                self.config,
                self.folder,
                self.mesh,
                self.model,
                self.optimizer,
                self.loader,
                architecture,
            ),
            ema=self.ema,
            evaluation=evaluation,
        )
        self.checkpointer.resume()
        self.done = self.folder.resume.step if self.folder.resume is not None else 0
        warm_up_buckets(self.model, rows=micro_batch, seq_len=16)
        self.checkpointer.start(self.step)
        self.checkpointer.saver = dataclasses.replace(
            self.checkpointer.saver, background=background
        )
        self.step.before_update = self.checkpointer.saver.before_update
        self._micro_batch = micro_batch
        self._batches: Iterator[Any] = iter(self.loader)

    def advance(self, steps: int) -> list[tuple[float, float, list[int]]]:
        """(loss, gradient norm, rows of this dp rank) of each of the next steps."""
        from threefold.training.batches import micro_batches
        from threefold.training.step import mean_loss

        curve = []
        for _ in range(steps):
            batch = next(self._batches)
            result = self.step.run(micro_batches(batch, self._micro_batch), lr=2e-3)
            self.done += 1
            curve.append(
                (
                    mean_loss(result, self.mesh),
                    result.grad_norm.item(),
                    batch["indices"].tolist(),
                )
            )
        return curve


def write_corpus(folder: Path) -> None:
    """The text that miniature runs in folders of `folder` read."""
    (folder / "corpus.txt").write_text(CORPUS)
