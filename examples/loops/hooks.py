"""`threefold.train` with rows, a loss and hooks of one's own; it stops when the evaluation is good enough."""

import sys

import torch
import torch.nn.functional as F

import threefold

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = [{"text": f"{n} times {m} is {n * m}. " * 8} for n in range(2, 12) for m in range(2, 12)]


class Watch(threefold.Callback):
    """Called on rank 0 with plain facts; returning True asks all ranks to stop."""

    def on_step(self, facts):
        print(f"step {facts.step}: loss {facts.metrics['loss']:.4f}")

    def on_eval(self, facts):
        return facts.metrics["eval_loss"] < 4.0

    def on_stop(self, facts):
        print(f"ended by {facts.reason} at step {facts.step}")


def confident(logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy with a penalty on the logits' size: the sum over this rank's tokens, and how many."""
    labels, learnt = batch["labels"], batch["labels"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss + 1e-3 * (logits.logsumexp(-1).square() * learnt).sum(), learnt.sum()


if __name__ == "__main__":
    config = {"model": {"config": LLAMA}, "data": {"seq_len": 64}, "train": {"steps": 40}, "eval": {"every": 5}}
    config["log"] = {"every": 5, "dir": sys.argv[1] if len(sys.argv) > 1 else "runs/hooks"}
    config["mesh"] = {"dp": int(sys.argv[2]) if len(sys.argv) > 2 else 1}
    threefold.train(config, dataset=ROWS[10:], eval_dataset=ROWS[:10], loss=confident, callbacks=[Watch()])
