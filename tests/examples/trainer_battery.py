"""What transformers' own suite asks of a Trainer, asked of any class, on any number of ranks, in plain numbers.

A case is a function of `made`; `made(kind, **arguments)` is a Trainer. Its result is a dict of numbers, lists, texts.
Steps have 8 rows on every number of ranks, in the dataset's order, so that all results should be those of one process
whose batches are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ranks.huggingface_cases import (
    LENGTH,
    VOCAB,
    Reviews,
    Sentences,
    arguments,
    causal_model,
    classifier,
)
from ranks.test_huggingface_training import DROPOUT_OFF

GLOBAL_BATCH = 8


class Labelled(Dataset[dict[str, Tensor]]):
    """Token rows with labels of any form: for each token, for several classes at once, or a number."""

    def __init__(self, size: int, form: str) -> None:
        self.tokens, self.form = Sentences(size).tokens, form

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        labels = {
            "tokens": torch.where(torch.arange(LENGTH) < 1 + index % LENGTH, row % 3, -100),
            "classes": (row[:3] % 2).float(),
            "number": row[0].float() / VOCAB,
            "none": None,
        }[self.form]
        return {"input_ids": row} if labels is None else {"input_ids": row, "labels": labels}


def token_classifier() -> Any:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    return BertForTokenClassification(
        BertConfig(**sizes, num_attention_heads=2, num_labels=3, **DROPOUT_OFF)
    )


class Line(nn.Module):
    """a x + b over the mean token, as a plain module; its loss is the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        y = self.a * input_ids.float().mean(1) / VOCAB + self.b
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


MODELS: dict[str, Callable[[], Any]] = {
    "causal": causal_model,
    "reviews": lambda: classifier(**DROPOUT_OFF),
    "tokens": token_classifier,
    "classes": lambda: classifier(problem_type="multi_label_classification", **DROPOUT_OFF),
    "number": lambda: classifier(num_labels=1, problem_type="regression", **DROPOUT_OFF),
    "line": Line,
}
DATA: dict[str, Callable[[int], Any]] = {
    "causal": Sentences,
    "reviews": Reviews,
    "tokens": lambda size: Labelled(size, "tokens"),
    "classes": lambda size: Labelled(size, "classes"),
    "number": lambda size: Labelled(size, "number"),
    "line": lambda size: Labelled(size, "number"),
}


class Maker(NamedTuple):
    """Makes Trainers of one class; `whole` leaves every step and every evaluation in one batch."""

    base: Any
    folder: Path
    world: int
    whole: bool

    def __call__(
        self, kind: str, *, micro: int = 1, size: int = 24, held_out: int = 7, **more: Any
    ) -> Any:
        given = {name: more.pop(name) for name in ARGUMENTS_OF_TRAINER if name in more}
        base = more.pop("own", lambda base: base)(self.base)
        model = more.pop("model", None) or MODELS[kind]()
        output = str(self.folder / more.pop("output", "run"))
        rows = 1 if self.whole else self.world * micro
        settings = {
            "per_device_train_batch_size": GLOBAL_BATCH // rows,
            "gradient_accumulation_steps": 1 if self.whole else micro,
            "per_device_eval_batch_size": 64 if self.whole else 2,
            "train_sampling_strategy": "sequential",
            **{
                "optim": "sgd",
                "learning_rate": 0.05,
                "lr_scheduler_type": "constant",
                "num_train_epochs": 2,
            },
            **{"logging_strategy": "steps", "logging_steps": 1, **more},
        }
        data = DATA[kind]
        args = arguments(output, **settings)
        return base(
            model,
            args,
            **{"train_dataset": data(size), "eval_dataset": data(held_out), **given},
        )


ARGUMENTS_OF_TRAINER = (
    *(
        "callbacks",
        "compute_loss_func",
        "compute_metrics",
        "data_collator",
        "eval_dataset",
        "optimizers",
    ),
    *("preprocess_logits_for_metrics", "train_dataset"),
)


def curve(trainer: Any) -> dict[str, Any]:
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
    }


def trained(trainer: Any, **resume: Any) -> dict[str, Any]:
    trainer.train(**resume)
    return curve(trainer)


def right(prediction: Any) -> dict[str, float]:
    return {
        "rows": len(prediction.label_ids),
        "right": float((prediction.predictions == prediction.label_ids).mean()),
    }


def stopping_after(steps: int) -> Any:
    from ranks.test_huggingface_training import stopper

    return stopper(steps)


def resumed(made: Any, kind: str, stop: int, **more: Any) -> dict[str, Any]:
    saving = {"save_strategy": "steps", "save_steps": 100, **more}
    first = made(kind, output=f"stop-{stop}", callbacks=[stopping_after(stop)], **saving)
    first.train()
    again = made(kind, output=f"stop-{stop}", **saving)
    return trained(
        again, resume_from_checkpoint=str(Path(again.args.output_dir) / f"checkpoint-{stop}")
    )


def events(made: Any) -> dict[str, Any]:
    from transformers import TrainerCallback

    heard: list[str] = []

    def hears(name: str) -> Callable[..., None]:
        return lambda self, args, state, control, **kwargs: heard.append(name)

    names = (
        "train_begin",
        "epoch_begin",
        "step_begin",
        "step_end",
        "epoch_end",
        "evaluate",
        "save",
        "train_end",
    )
    callback = type(
        "Heard", (TrainerCallback,), {f"on_{name}": hears(name) for name in names}
    )()
    trained(made("reviews", callbacks=[callback], eval_strategy="epoch", save_strategy="epoch"))
    return {"heard": " ".join(heard)}


def best(made: Any) -> dict[str, Any]:
    every = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = made("reviews", load_best_model_at_end=True, **every)
    trainer.train()
    name = Path(trainer.state.best_model_checkpoint).name
    return {
        "best": name,
        "metric": trainer.state.best_metric,
        "after": trainer.evaluate()["eval_loss"],
    }


def early(made: Any) -> dict[str, Any]:
    from transformers import EarlyStoppingCallback

    every = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    stop = EarlyStoppingCallback(1, 10.0)
    trainer = made("reviews", callbacks=[stop], load_best_model_at_end=True, **every)
    return {**trained(trainer), "step": trainer.state.global_step}


def kept(made: Any) -> dict[str, Any]:
    trainer = made(
        "causal", output="kept", save_strategy="steps", save_steps=1, save_total_limit=2
    )
    trainer.train()
    return {
        "kept": " ".join(
            sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
        )
    }


def frozen(made: Any) -> dict[str, Any]:
    model = causal_model()
    model.model.embed_tokens.requires_grad_(False)
    before = model.model.embed_tokens.weight.detach().clone()
    found = trained(made("causal", model=model))
    return {**found, "moved": float((model.model.embed_tokens.weight - before).abs().max())}


def lora(made: Any) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(causal_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return trained(made("causal", model=model))


def own_optimizer(made: Any) -> dict[str, Any]:
    model = causal_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return trained(made("causal", model=model, optimizers=(optimizer, schedule)))


def rates(made: Any) -> dict[str, Any]:
    trainer = made(
        "causal",
        lr_scheduler_type="cosine",
        warmup_steps=2,
        optim="adamw_torch",
        learning_rate=1e-3,
    )
    found = trained(trainer)
    return {
        **found,
        "rates": [
            line["learning_rate"] for line in trainer.state.log_history if "grad_norm" in line
        ],
    }


def rows_of_prediction(made: Any) -> dict[str, Any]:
    output = made("reviews").predict(Reviews(7))
    return {
        "logits": output.predictions.tolist(),
        "labels": output.label_ids.tolist(),
        "loss": output.metrics["test_loss"],
    }


def without_labels(made: Any) -> dict[str, Any]:
    output = made("reviews").predict(Labelled(7, "none"))
    return {"logits": output.predictions.tolist(), "labels": output.label_ids is None}


def preprocessed(made: Any) -> dict[str, Any]:
    first = {
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "compute_metrics": right,
    }
    found = made("reviews", **first).evaluate()
    return {name: found[f"eval_{name}"] for name in ("rows", "right", "loss")}


def by_batches(made: Any) -> dict[str, Any]:
    sums = np.zeros(2)

    def add(prediction: Any, compute_result: bool) -> dict[str, float]:
        labels = np.asarray(prediction.label_ids)
        sums[:] += [
            (np.asarray(prediction.predictions).argmax(-1) == labels).sum(),
            len(labels),
        ]
        return (
            {"right": float(sums[0] / sums[1]), "rows": float(sums[1])}
            if compute_result
            else {}
        )

    found = made("reviews", compute_metrics=add, batch_eval_metrics=True).evaluate()
    return {name: found[f"eval_{name}"] for name in ("rows", "right", "loss")}


def with_inputs(made: Any) -> dict[str, Any]:
    def seen(prediction: Any) -> dict[str, float]:
        return {"inputs": float(prediction.inputs.sum()), "rows": len(prediction.inputs)}

    found = made("reviews", compute_metrics=seen, include_for_metrics=["inputs"]).evaluate()
    return {name: found[f"eval_{name}"] for name in ("rows", "inputs")}


def several_sets(made: Any) -> dict[str, Any]:
    found = made("causal", eval_dataset={"a": Sentences(7), "b": Sentences(5)}).evaluate()
    return {name: found[f"eval_{name}_loss"] for name in ("a", "b")}


def growing_rows(made: Any) -> dict[str, Any]:
    class Growing(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = Sentences(7).tokens[index][: 2 + index % 6]
            return {"input_ids": row, "labels": row}

    def pad(rows: list[Any]) -> dict[str, Tensor]:
        sequence = torch.nn.utils.rnn.pad_sequence
        ids = sequence([row["input_ids"] for row in rows], batch_first=True)
        return {
            "input_ids": ids,
            "labels": sequence([row["labels"] for row in rows], True, -100),
        }

    output = made("causal", data_collator=pad).predict(Growing())
    return {
        "labels": [row[row != -100].tolist() for row in output.label_ids],
        "loss": output.metrics["test_loss"],
    }


def tokens_seen(made: Any) -> dict[str, Any]:
    trainer = made("causal", size=21, include_num_input_tokens_seen="all")
    trainer.train()
    return {"tokens": trainer.state.num_input_tokens_seen}


def mean_loss(model_outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = model_outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / (
        (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )


def without_loss_kwargs(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = F.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()
            )
            return (loss, outputs) if return_outputs else loss

    return Own


def own_loss(made: Any) -> dict[str, Any]:
    rows = Labelled(24, "none")
    settings = {
        "train_dataset": rows,
        "remove_unused_columns": False,
        "own": without_loss_kwargs,
    }
    return trained(made("causal", micro=2, **settings))


def again(made: Any) -> dict[str, Any]:
    trainer = made("causal", num_train_epochs=1)
    trainer.train()
    return trained(trainer)


def started(made: Any) -> dict[str, Any]:
    trainer = made("causal", eval_on_start=True, eval_strategy="epoch")
    trainer.train()
    found = [line for line in trainer.state.log_history if "eval_loss" in line]
    return {
        "losses": [line["eval_loss"] for line in found],
        "steps": [line["step"] for line in found],
    }


def grouped_log(made: Any) -> dict[str, Any]:
    trainer = made("causal", logging_steps=3)
    output = trainer.train()
    return {
        "losses": curve(trainer)["losses"],
        "mean": output.training_loss,
        "steps": output.global_step,
    }


def steps_of(made: Any, **more: Any) -> dict[str, Any]:
    trainer = made("causal", size=21, **more)
    return {**trained(trainer), "step": trainer.state.global_step, "epoch": trainer.state.epoch}


def dataset_columns(made: Any) -> dict[str, Any]:
    from datasets import Dataset as Columns

    rows = [
        {**{name: value.tolist() for name, value in Sentences(24)[row].items()}, "note": "x"}
        for row in range(24)
    ]
    return trained(made("causal", train_dataset=Columns.from_list(rows)))


CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "loss and gradient norm of a language model": lambda made: trained(made("causal")),
    "the same in micro-batches": lambda made: trained(made("causal", micro=2)),
    "a classifier": lambda made: trained(made("reviews")),
    "a classifier in micro-batches": lambda made: trained(made("reviews", micro=2)),
    "a plain module": lambda made: trained(made("line")),
    "labels of tokens, in micro-batches": lambda made: trained(made("tokens", micro=2)),
    "several classes at once": lambda made: trained(made("classes", micro=2)),
    "regression": lambda made: trained(made("number", micro=2)),
    "label smoothing": lambda made: trained(
        made("causal", micro=2, label_smoothing_factor=0.1)
    ),
    "compute_loss_func": lambda made: trained(
        made("causal", micro=2, compute_loss_func=mean_loss)
    ),
    "a custom compute_loss": own_loss,
    "gradient clipping": lambda made: trained(made("causal", max_grad_norm=0.1)),
    "schedule with warm-up": rates,
    "a custom optimizer and schedule": own_optimizer,
    "weight decay": lambda made: trained(
        made("causal", optim="adamw_torch", weight_decay=0.5, learning_rate=1e-3)
    ),
    "frozen parameters": frozen,
    "adapters of peft": lora,
    "activation checkpointing": lambda made: trained(
        made("causal", gradient_checkpointing=True)
    ),
    "columns of a dataset that the model does not take": dataset_columns,
    "an epoch that the steps do not divide": lambda made: steps_of(made),
    "max_steps beyond an epoch": lambda made: steps_of(made, max_steps=4),
    "drop_last": lambda made: steps_of(made, dataloader_drop_last=True),
    "train called twice": again,
    "logging every few steps, and the mean": grouped_log,
    "number of input tokens": tokens_seen,
    "callbacks' events": events,
    "early stopping": early,
    "the best model at the end": best,
    "the last checkpoints are kept": kept,
    "resuming inside an epoch": lambda made: resumed(made, "causal", 2),
    "resuming after an epoch": lambda made: resumed(made, "causal", 3),
    "resuming a classifier, with AdamW": lambda made: resumed(
        made, "reviews", 4, optim="adamw_torch"
    ),
    "evaluation of a language model": lambda made: {
        "loss": made("causal").evaluate()["eval_loss"]
    },
    "evaluation of labels of tokens": lambda made: {
        "loss": made("tokens").evaluate()["eval_loss"]
    },
    "evaluation on start and after epochs": started,
    "several evaluation sets": several_sets,
    "predictions in order": rows_of_prediction,
    "predictions without labels": without_labels,
    "predictions of growing rows": growing_rows,
    "metrics of preprocessed logits": preprocessed,
    "metrics by batches": by_batches,
    "metrics with inputs": with_inputs,
}


# One of each mechanism that ranks can get wrong: sums of losses, their weights, saving and resuming, gathering.
SHORT = [
    "the same in micro-batches",
    "labels of tokens, in micro-batches",
    "a custom compute_loss",
    "gradient clipping",
    "adapters of peft",
    "an epoch that the steps do not divide",
    "callbacks' events",
    "the best model at the end",
    "resuming inside an epoch",
    "evaluation of labels of tokens",
    "several evaluation sets",
    "predictions of growing rows",
    "metrics by batches",
]


def run(
    base: Any, folder: str, world: int, whole: bool, names: list[str]
) -> dict[str, dict[str, Any]]:
    """The result of each of these cases; `error` instead of what a class cannot do."""
    found = {}
    for number, name in enumerate(names):
        case = CASES[name]
        torch.manual_seed(0)
        try:
            found[name] = case(Maker(base, Path(folder) / str(number), world, whole))
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return found


def same(found: Any, wanted: Any) -> bool:
    """Equal within the bounds of the project: losses 1e-4, others 1e-3 relative."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            same(found[name], wanted[name]) for name in wanted
        )
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, str | bool):
        return bool(found == wanted)
    return math.isclose(found, wanted, rel_tol=1e-3, abs_tol=1e-4)
