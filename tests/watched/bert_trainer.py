"""transformers' Trainer as its documentation has it: a BERT classifier, two epochs; `RECORD`: with the referee."""

import sys
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))
rows = [
    {"input_ids": torch.randint(0, 64, (16,)), "labels": torch.randint(0, 2, ())}
    for _ in range(46)
]
with tempfile.TemporaryDirectory() as folder:
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, **settings
    )
    callbacks = []
    if sys.argv[1:]:
        from threefold import RefereeCallback

        callbacks = [RefereeCallback(record=sys.argv[1])]
    Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
