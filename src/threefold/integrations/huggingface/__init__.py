"""For users of Hugging Face's loops: transformers.Trainer and accelerate with threefold's promises.

`Trainer` replaces transformers' own and takes its arguments. `AuditCallback` alone proves what another Trainer reads.
In an accelerate loop, `prepare_loader` and `prepare_evaluation_loader` replace `accelerator.prepare(loader)`;
`count_targets`, `exact_loss` and `exact_mean` compute the mean over all target tokens.
"""

from threefold.integrations.huggingface.accelerate import (
    prepare_evaluation_loader as prepare_evaluation_loader,
)
from threefold.integrations.huggingface.accelerate import prepare_loader as prepare_loader
from threefold.integrations.huggingface.audit import AuditCallback as AuditCallback
from threefold.integrations.huggingface.loss import count_targets as count_targets
from threefold.integrations.huggingface.loss import exact_loss as exact_loss
from threefold.integrations.huggingface.loss import exact_mean as exact_mean
from threefold.integrations.huggingface.trainer import Trainer as Trainer
