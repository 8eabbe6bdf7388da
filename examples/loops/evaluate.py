"""An exact evaluation, whatever rows each rank has; and the logits of whole rows."""

import sys

import torch

import threefold

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def right(logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """As a loss: how many of this rank's tokens are predicted right, of how many."""
    return (logits.argmax(-1) == batch["labels"]).sum().float(), (batch["labels"] != -100).sum()


def main(dp: int = 1, cp: int = 1, tp: int = 1) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    model = threefold.load_model(config=LLAMA, mesh=mesh)
    ids = torch.randint(64, (7, 33), generator=torch.Generator().manual_seed(0))
    # Seven rows: dp ranks have unequally many, in batches of unequal sizes.
    own = ids[mesh.dp_rank :: dp].split(2)
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in own]
    found = threefold.EvalStep(model)(batches)
    accuracy = threefold.EvalStep(model, loss=right)(batches)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[:1, :-1])
    if mesh.rank == 0:
        print(f"loss {found.loss:.5f} over {found.num_counted} tokens, {accuracy.loss_sum:.0f} of them right")
        print(f"logits {list(logits.shape)} of the first row, the same on every rank: {logits.mean():.5f}")
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
