"""A classifier of transformers on sharded data ranks: torchrun --nproc-per-node 2 classifier.py 2 2"""

import sys

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

import threefold

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def loss(outputs, batch: dict) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs.logits, batch["classes"], reduction="sum"), len(batch["classes"])


def main(dp: int = 1, dp_shard: int = 1) -> None:
    mesh = threefold.init_mesh(dp=dp, dp_shard=dp_shard)
    torch.manual_seed(0)
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = threefold.load_model(BertForSequenceClassification(config), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    step = threefold.TrainStep(model, optimizer, loss=loss)
    for number in range(8):
        ids = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(number))
        batch = {"input_ids": ids, "classes": (ids[:, 0] < 32).long()}
        numbers = step({name: values[mesh.dp_rank :: dp] for name, values in batch.items()})
        scheduler.step()
        if mesh.rank == 0:
            print(f"step {number + 1}: loss {numbers.loss:.5f}, gradient norm {numbers.grad_norm:.3f}", flush=True)
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
