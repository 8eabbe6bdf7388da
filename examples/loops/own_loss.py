"""A loss of one's own over documents: prefer the first of each row to its second, by their log-probabilities."""

import sys

import torch
import torch.nn.functional as F

import threefold

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def main(dp: int = 1, cp: int = 1, tp: int = 1) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    model = threefold.load_model(config=LLAMA, mesh=mesh)

    def loss(logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, int]:
        """This rank's tokens [rows, sequence / cp] of its rows -> (the sum over its pairs, how many)."""
        learnt = batch["labels"] != -100
        targets = batch["labels"].clamp(min=0)[..., None]
        log_probs = logits.log_softmax(-1).gather(-1, targets)[..., 0] * learnt
        of_documents = log_probs.new_zeros(len(targets), 2).scatter_add(1, batch["document_ids"], log_probs)
        chosen, rejected = model.sum_over_context(of_documents).unbind(1)  # over whole documents, from all cp ranks
        return -F.logsigmoid(0.1 * (chosen - rejected)).sum(), len(targets)

    step = threefold.TrainStep(model, loss=loss, lr=2e-3, micro_batch=2)
    for number in range(8):
        ids = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(number))[mesh.dp_rank :: dp]
        documents = (torch.arange(32) >= 16).long().expand(len(ids), 32)
        numbers = step({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "document_ids": documents})
        if mesh.rank == 0:
            print(f"step {number + 1}: loss {numbers.loss:.5f}, gradient norm {numbers.grad_norm:.3f}", flush=True)
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
