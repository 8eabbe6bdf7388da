"""Nothing is trained on in a step, a run or an evaluation: an error by name on every rank; no weight changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA
from ranks.runs import command
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 2}
data: {source: short.jsonl, chat_template: chat.jinja, seq_len: 64, truncate: true, packing: none}
mesh: {device: cpu, dp: 1}
train: {steps: 4, global_batch: 2}
log: {every: 1, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of which rows keep the answer (short), none of it (long), or in one row of four (mixed)."""
    folder = tmp_path_factory.mktemp("nothing")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "config.yaml").write_text(CONFIG)
    for name, asked in (
        ("short", [2] * 16),
        ("long", [300] * 16),
        ("mixed", [2, 300, 300, 300] * 8),
    ):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number, length in enumerate(asked):
                question = {"role": "user", "content": "q" * length}
                answer = {"role": "assistant", "content": f"answer {number}"}
                file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return folder


def _empty_batches(sizes: dict[str, int], custom: bool) -> list[str]:
    import torch

    import threefold
    from threefold.errors import DataError

    def counted(
        outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = batch["labels"] != -100
        return outputs.float().logsumexp(-1)[kept].sum(), kept.sum()

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    loss: Any = counted if custom else None
    step, evaluate = threefold.TrainStep(model, loss=loss), threefold.EvalStep(model, loss=loss)
    rows = torch.randint(60, (4, 17), generator=torch.Generator().manual_seed(1))[
        mesh.dp_rank :: mesh.dp_size
    ]
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:].contiguous()}
    step(batch)  # from now on moments and weight decay alone would change the weights
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    said = []
    for call in (lambda: step(empty), lambda: evaluate([empty, empty])):
        with pytest.raises(DataError) as raised:
            call()
        said.append(raised.value.problems[0].what)
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True)
    )
    # Labels on one data rank are enough.
    some = batch if mesh.dp_rank == mesh.dp_size - 1 else empty
    assert all(number == number for number in step(some)) and evaluate([some]).num_counted > 0
    assert not any(
        torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True)
    )
    mesh.close()
    return said


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"dp": 2, "dp_shard": 2}, {"dp": 2, "dp_shard": 1}, {"tp": 2}, {"cp": 2}]
)
def test_empty_batch_is_refused_on_every_rank_and_changes_nothing(
    sizes: dict[str, int], custom: bool
) -> None:
    ranks = 2 if sizes else 1
    for said in run_ranks(_empty_batches, ranks, sizes, custom):
        step, evaluation = said
        assert step.startswith("the global batch has no token that is trained on: ")
        assert evaluation.startswith("the evaluation has no token that is trained on: ")


@pytest.mark.parametrize("key", ["data.source", "eval.source"])
def test_rows_without_any_target_are_refused_before_the_first_step(
    folder: Path, key: str
) -> None:
    """The evaluation too, which would come hours later."""
    done = command(
        folder, "train", "config.yaml", f"--{key}", "long.jsonl", "--log.dir", f"cut-{key}"
    )
    assert done.returncode == 2, done.stdout
    assert f"{key} has no token that is trained on in any of its 16 rows" in done.stderr
    assert "fix: --data.seq_len 3" in done.stderr and "or --data.truncate false" in done.stderr
    assert not (folder / f"cut-{key}/metrics.jsonl").exists()


def test_head_says_what_packing_has_left(folder: Path) -> None:
    done = command(
        folder, "train", "config.yaml", "--eval.source", "short.jsonl", "--log.dir", "whole"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "warning: 16 of 16 held-out documents trained on, token for token: document 0 (document 0 of"
        in done.stdout
    )
    targets = sum(len(f"answer {number}") + 1 for number in range(16))  # with the end token
    assert (
        f"trained on: assistant: {targets} of " in done.stdout
        and f"; after packing: {targets}\n" in done.stdout
    )
    refused = command(folder, "eval", "whole", "--eval.source", "long.jsonl")
    assert refused.returncode == 2
    assert (
        "eval.source has no token that is trained on" in refused.stderr
        and "loss" not in refused.stdout
    )


def test_ledger_says_of_each_document_what_packing_has_left(folder: Path) -> None:
    """With one step, in which the row that keeps its answer is read beside one that does not."""
    unshuffled = (
        "train",
        "config.yaml",
        "--data.source",
        "mixed.jsonl",
        "--data.shuffle",
        "false",
    )
    done = command(folder, *unshuffled, "--log.dir", "ledger", "--train.steps", "1")
    assert done.returncode == 0, done.stderr
    listed = command(folder, "data", "audit", "ledger", "--rows")
    assert listed.returncode == 0, listed.stderr
    lines = [
        line
        for line in listed.stdout.splitlines()
        if line.startswith("source") and "trained on" in line
    ]
    answers = [len(f"answer {number}") + 1 for number in range(32)]
    for number, (line, answer) in enumerate(zip(lines, answers, strict=False)):
        kept = f"{answer}" if number % 4 == 0 else f"0, {answer} cut off (truncation {answer})"
        assert line.startswith(f"source document {number}: trained on: {answer} of ")
        assert line.endswith(f" tokens; after packing: {kept}")
    (sums,) = lines[32:]
    kept = sum(answers[::4])
    assert sums.startswith(f"source, 32 documents: trained on: {sum(answers)} of ")
    cut = sum(answers) - kept
    assert sums.endswith(f"after packing: {kept}, {cut} cut off (truncation {cut})")
    assert (
        f"after packing: {kept}, none in 24 of its rows; cut off: truncation {cut}\n"
        in done.stdout
    )


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--mesh.dp", "2"),
        ("--mesh.dp", "2", "--train.reduce", "exact", "--train.micro_batch", "1"),
    ],
)
def test_step_without_a_target_ends_the_run_by_name(
    folder: Path, extra: tuple[str, ...]
) -> None:
    """Not in order to learn nothing: three of four rows are a question that was cut."""
    to = f"mixed-{len(extra)}"
    unshuffled = (
        "train",
        "config.yaml",
        "--data.source",
        "mixed.jsonl",
        "--data.shuffle",
        "false",
    )
    done = command(folder, *unshuffled, "--log.dir", to, *extra)
    assert done.returncode == 1, done.stdout
    targets = sum(len(f"answer {number}") + 1 for number in range(0, 32, 4))
    assert f"after packing: {targets}, none in 24 of its rows" in done.stdout
    assert (
        "step 2: no token of its rows is trained on; the step read rows 2, 3\n" in done.stderr
    )
    assert (
        "expected: a token to train on in each step; the weights are as step 1 left them"
        in done.stderr
    )
    assert "--data.skip '[[2, 2]]'" in done.stderr and "--data.seq_len" in done.stderr
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / to / "metrics.jsonl").open()
    ]
    assert [line["step"] for line in lines] == [1]
    # What it says to do helps.
    skipped = command(
        folder, *unshuffled, "--log.dir", f"{to}-skip", "--train.nonfinite", "skip", *extra
    )
    assert skipped.returncode == 0, skipped.stderr
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / f"{to}-skip/metrics.jsonl").open()
    ]
    assert [line["step"] for line in lines if "skipped" in line] == [2, 4]
    assert [line["loss"] is None for line in lines if "loss" in line] == [
        False,
        True,
        False,
        True,
    ]
