"""GRPO: the model writes groups of answers, a rule judges them, and their differences teach it (arXiv:2402.03300)."""

import sys

import torch
import torch.nn.functional as F

import threefold

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
PROMPTS, PROMPT, ANSWERS, NEW, EPSILON = 4, 4, 8, 12, 0.2


def reward(written: torch.Tensor) -> torch.Tensor:
    """How much of each answer [rows, new] is of large numbers."""
    return (written >= 32).float().mean(1)


def rollout(model: threefold.Model, number: int) -> dict[str, torch.Tensor]:
    """The answers to one prompt, as a batch of rows. What is drawn depends on the prompt's number, and on no mesh."""
    prompt = torch.randint(2, 64, (1, PROMPT), generator=torch.Generator().manual_seed(number))
    rows = model.generate(prompt.expand(ANSWERS, -1), seed=number, do_sample=True, top_k=0, max_new_tokens=NEW)
    rows = F.pad(rows, (0, PROMPT + NEW - rows.shape[1]))
    written = rows[:, PROMPT:]
    before_end = ((written == 1).cumsum(1) - (written == 1).long()) == 0
    score = reward(written)
    advantages = ((score - score.mean()) / (score.std() + 1e-4))[:, None].expand(-1, PROMPT + NEW)
    labels = torch.full_like(rows, -100)
    labels[:, PROMPT - 1 : -1] = written.where(before_end, -100)
    with torch.no_grad():
        old = model(input_ids=rows).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"input_ids": rows, "labels": labels, "advantages": advantages, "old": old, "score": score}


def loss(log_probs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective of each written token, summed; and how many there are."""
    written, advantages = batch["labels"] != -100, batch["advantages"]
    ratio = torch.where(written, log_probs - batch["old"], 0.0).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return -(gain * written).sum(), written.sum()


def main(dp: int = 1, cp: int = 1, tp: int = 1, rounds: int = 10) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    model = threefold.load_model(config=LLAMA, mesh=mesh)
    step = threefold.TrainStep(model, loss=loss, loss_on="log_probabilities", lr=1e-2)
    for number in range(rounds):
        prompts = range(PROMPTS * number, PROMPTS * (number + 1))[mesh.dp_rank :: dp]
        batches = [rollout(model, prompt) for prompt in prompts]
        score = torch.stack([batch.pop("score").mean() for batch in batches]).mean()
        for _ in range(2):  # the second of them is no longer what wrote the answers: the ratio clips it
            numbers = step(batches)
        if mesh.rank == 0:
            print(f"round {number + 1}: score {score:.3f} of this rank's, loss {numbers.loss:.5f}", flush=True)
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
