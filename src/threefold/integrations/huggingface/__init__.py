"""For users of Hugging Face's loops: transformers.Trainer and accelerate with threefold's promises.

`Trainer` takes the place of transformers' own, with its arguments. `AuditCallback` alone proves what another Trainer
reads. In a loop of accelerate's, `prepare_loader` and `prepare_evaluation_loader` take the place of
`accelerator.prepare(loader)`; `count_targets`, `exact_loss` and `exact_mean` give the mean over all target tokens.
"""

from threefold.integrations.huggingface.accelerate import prepare_evaluation_loader, prepare_loader
from threefold.integrations.huggingface.audit import AuditCallback
from threefold.integrations.huggingface.loss import count_targets, exact_loss, exact_mean
from threefold.integrations.huggingface.trainer import Trainer

__all__ = [
    "AuditCallback",
    "Trainer",
    "count_targets",
    "exact_loss",
    "exact_mean",
    "prepare_evaluation_loader",
    "prepare_loader",
]
