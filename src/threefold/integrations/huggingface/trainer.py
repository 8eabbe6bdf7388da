"""transformers.Trainer with threefold's three promises: the same data, the same curve, the same state.

A thin subclass: the loop is transformers'. It replaces the loaders (`training_loader`, `evaluation_loader`), the
weight of a micro-batch in the loss (`loss`), the mean of an evaluation, the place where a run resumes and, for models
that transformers has loaded in shards, the saved state (`trainer_checkpoint`). Invariants: an epoch reads every sample
once; loss and gradient are those of the mean over all targets of a step, on any number of ranks and micro-batches; a
run resumes at the next sample, also with other ranks or another batch size.
"""

import functools
import inspect
import itertools
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import has_length
from transformers.utils import logging

from threefold.data.sampling.distribute import refuse_other_dataset, require_distributed
from threefold.integrations.huggingface import (
    checks,
    context_parallel,
    loaders,
    trainer_checkpoint,
)
from threefold.integrations.huggingface.audit import AuditCallback
from threefold.integrations.huggingface.evaluation_loader import EvaluationLoader
from threefold.integrations.huggingface.loss import (
    RunningMean,
    StepPart,
    measuring,
    part_of_mean,
    targets_in,
    weighing,
)
from threefold.integrations.huggingface.training_loader import Axis, TrainLoader
from threefold.jsonl import Values
from threefold.model.data_parallel import frozen_in

log = logging.get_logger(__name__)
# For a sharded model; transformers' own scheduler.pt is a pickle.
_SCHEDULER = "scheduler.json"


class Trainer(transformers.Trainer):
    """transformers.Trainer, exact on any number of ranks, with the same arguments."""

    # Decorated, so that the signature is that of the installed transformers.
    @functools.wraps(transformers.Trainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The next class may be another Trainer (TRL's), with its own arguments.
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        checks.check_version(transformers.Trainer, transformers.__version__)
        of_trl = checks.check_class(type(self))
        checks.check_model(arguments.get("model"))
        self._train_loader: Any = None
        self._checkpoint: Path | None = None
        self._resumed: trainer_checkpoint.Resumed | None = None
        # The parts of each micro-batch of the step that is not trained yet, the one that is, and all of all ranks.
        self._micro_batches: deque[list[StepPart]] = deque()
        self._part: StepPart | None = None
        self._step = StepPart(0, 0)
        self.loss_weight, self._collects, self._of_trl = 1.0, False, of_trl
        self._mean: RunningMean | None = None
        with trainer_checkpoint.may_save_shards(arguments.get("model"), arguments.get("args")):
            super().__init__(*args, **kwargs)
        checks.check_request(self)
        self._ranks = trainer_checkpoint.all_ranks(self.axis.topology)
        if (mesh := context_parallel.mesh_of_rows()) is not None:
            context_parallel.cut_rows(self.model, mesh)
        if not any(
            isinstance(callback, AuditCallback) for callback in self.callback_handler.callbacks
        ):
            self.add_callback(AuditCallback())
        self.callback_handler.callbacks.insert(0, trainer_checkpoint.EpochByRows(self))

    def _build_accelerator_args(self, **kwargs: Any) -> Values:
        built = super()._build_accelerator_args(**kwargs)
        has_mesh = getattr(self.model, "is_distributed_loading_by_transformers", False)
        if has_mesh and self.args.parallelism_config is None:
            # Such a model has its own mesh; accelerate would look for another one, which a CPU does not have.
            built.pop("parallelism_config", None)
        return built

    # ---- Loaders ----

    @property
    def axis(self) -> Axis:
        """This process's place on the dp axis; tensor and context ranks share its rows."""
        mesh = context_parallel.mesh_of_rows()
        sharers = self.get_tp_size() * (mesh.cp_size if mesh is not None else 1)
        return Axis(self.args.process_index, self.args.world_size, sharers=sharers)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            log.warning_once(
                "A stream has no positions: transformers' own loader reads it, and only the loss is exact."
            )
            return super()._get_dataloader(
                dataset, description, batch_size, sampler_fn, is_training, dataloader_key
            )
        rows, collate = dataset, self.data_collator
        if hasattr(dataset, "remove_columns"):
            rows = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        if is_training:
            sampler = sampler_fn(rows) if sampler_fn is not None else RandomSampler(rows)
            return loaders.training(self, rows, sampler, batch_size=batch_size, collate=collate)
        loader = loaders.evaluation(self, rows, batch_size=batch_size, collate=collate)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders = {
                **getattr(self, "_eval_dataloaders", {}),
                dataloader_key: loader,
            }
        return loader

    # ---- The loss of a step ----

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> Any:
        """As transformers'; counts the step's targets over all ranks and micro-batches, for any model.

        Raises:
            ThreefoldError: ranks bring what does not belong to one step (`Mesh.agree`), on every rank.
        """
        samples: list[Any] = []

        def read() -> tuple[list[dict[str, Any]], int]:
            samples.extend(itertools.islice(epoch_iterator, num_batches))
            self._micro_batches = deque(self._parts_of(batch) for batch in samples)
            parts = [part.batch for parts in self._micro_batches for part in parts]
            return [dict(part) if isinstance(part, Mapping) else {} for part in parts], 0

        # Where rank 0 reads a stream for all, the others wait for its batch, not for its error.
        dispatched = read() if isinstance(self._train_loader, DataLoaderDispatcher) else None
        self._ranks.agree(
            "training step" + frozen_in(self.model),
            self.state.global_step + 1,
            lambda: dispatched or read(),
        )
        self._collects = True
        try:
            return samples, self._get_num_items_in_batch(samples, device)
        finally:
            self._collects = False

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Targets of the step over all ranks; in an evaluation those of the batch, if there is a compute_loss_func."""
        if not batch_samples or not (self._collects or self._mean is not None):
            return super()._get_num_items_in_batch(batch_samples, device)
        first = batch_samples[0]
        if not self._collects:
            own = targets_in(first, shifts_labels=self._loss_shifts_labels)
            own = torch.as_tensor(own, device=device)
            rows = find_batch_size(first) or 1
            return own.where(own > 0, rows) if self.compute_loss_func else None
        own_parts = [
            (part.targets, part.rows) for parts in self._micro_batches for part in parts
        ]
        all_parts = self.accelerator.reduce(
            torch.tensor(own_parts, device=device).sum(0), reduction="sum"
        )
        targets, rows = all_parts // self.axis.sharers
        self._step = StepPart(int(targets), int(rows))
        labelled = isinstance(first, Mapping) and isinstance(first.get("labels"), Tensor)
        # An overridden compute_loss gets the number of targets where transformers passes it.
        is_passed = self.compute_loss_func is not None or (
            labelled and self.model_accepts_loss_kwargs
        )
        # A loss of one's own may have no use for labels: then its rows count.
        return (targets or rows) if is_passed else None

    def _parts_of(self, batch: Any) -> list[StepPart]:
        """The parts of one micro-batch; a stream's has no numbered rows, and is weighed as one."""
        read = (
            self._train_loader.returned.popleft()
            if isinstance(self._train_loader, TrainLoader)
            else None
        )
        parts = [(batch, 1, False)]
        if read is not None:
            parts = [(batch, read.rows, read.alone), (read.rest, read.rest_rows, True)]
        total = max(sum(rows for _, rows, _ in parts), 1)
        return [
            StepPart(
                int(targets_in(part, shifts_labels=self._loss_shifts_labels)) * (rows > 0),
                rows,
                rows / total,
                alone,
                part,
            )
            for part, rows, alone in parts
            if part is not None
        ]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers': forward and backward of one micro-batch, or of both of its parts."""
        if not self._micro_batches:
            return super().training_step(model, inputs, num_items_in_batch)
        parts = self._micro_batches.popleft()
        syncs = self.accelerator.sync_gradients
        losses = []
        for number, part in enumerate(parts, start=1):
            # DeepSpeed makes the optimizer's step in the backward pass that synchronises gradients.
            self.accelerator.gradient_state._set_sync_gradients(syncs and number == len(parts))
            losses.append(
                self._part_step(
                    part, model, inputs if number == 1 else part.batch, num_items_in_batch
                )
            )
        return torch.stack(losses).sum()

    def _part_step(
        self, part: StepPart, model: Any, inputs: Any, num_items_in_batch: Any
    ) -> Tensor:
        self._part = part
        try:
            with weighing(self, part, self._step):
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._part = None
        super()._track_num_input_tokens(part.counted(inputs))
        return loss

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Nothing: the tokens of every part have been counted."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As transformers', but returns what the micro-batch contributes to the mean over the step."""
        if self._mean is not None:
            computed = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, outputs = computed if return_outputs else (computed, None)
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss / self.axis.dp_size  # transformers multiplies by it, for gradients
        elif self.compute_loss_func is not None or self._part is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        else:
            with_outputs = return_outputs or not self._of_trl or self._part.alone
            computed = super().compute_loss(model, inputs, return_outputs=with_outputs)
            loss, outputs = computed if with_outputs else (computed, None)
            targets, all_targets = self._part.targets, self._step.targets
            ranks = self.axis.dp_size / (self.loss_weight or 1.0)
            loss = part_of_mean(
                loss, outputs, targets=targets, all_targets=all_targets, ranks=ranks
            )
        return (loss, outputs) if return_outputs else loss

    # ---- Evaluation ----

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As transformers'; the loss is the sum over all targets / their number, rows are in the dataset's order.

        Of a stream, the rows that transformers repeats at its end count again.
        """
        self._ranks.agree("an evaluation")
        settings = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        exact = isinstance(dataloader, EvaluationLoader)
        if not exact and has_length(dataloader):
            return super().evaluation_loop(dataloader, *settings)
        self._mean = RunningMean(self.args.device)
        if exact:
            refuse_other_dataset(dataloader.dataset.rows, self._ranks)
            self.gather_function = dataloader.gather
        try:
            with measuring(self, self._mean, dataloader):
                output = super().evaluation_loop(dataloader, *settings)
            mean = self._mean.over_ranks(self.accelerator)
        finally:
            self._mean = None
        if mean is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = mean
        return output

    # ---- Resuming ----

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; `True` resumes from the newest complete checkpoint.

        Raises:
            CheckpointError: no such checkpoint, or one of another Trainer.
            DataError: the checkpoint has another order: another seed, or data of another size.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(
                trainer_checkpoint.newest_complete(Path(self.args.output_dir))
            )
        self._checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._prepare_model_again()
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def _prepare_model_again(self) -> None:
        """Lets training wrap the model: an evaluation before it marks the model itself as prepared, for no gradients.

        Without, `train` after `evaluate` or `predict` would train every rank's copy alone.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return  # these wrap it in the same way for both
        if self.model.__dict__.pop("_is_accelerate_prepared", False):
            self.accelerator._models = [
                each for each in self.accelerator._models if each is not self.model
            ]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As transformers'; after a resume the remaining steps are counted from the saved place."""
        self._train_loader = dataloader = loaders.adopted(self, dataloader)
        self._resumed = None
        values = super().set_initial_training_values(args, dataloader)
        if not isinstance(dataloader, TrainLoader):
            rows = getattr(dataloader, "dataset", None)
            if rows is None or (has_length(rows) and not isinstance(rows, IterableDataset)):
                require_distributed(dataloader, self.axis)
            return values
        sampler = dataloader.sampler
        order = sampler.state_dict()["fingerprint"]
        self._ranks.agree(f"training by {sampler.global_batch} rows of {order}")
        dataloader.refuse_other_dataset(self._ranks)
        if self._checkpoint is None or args.ignore_data_skip:
            return values
        self._resumed = trainer_checkpoint.Resumed(
            self._checkpoint, dataloader, accumulation=args.gradient_accumulation_steps
        )
        epochs, per_epoch, *rest, max_steps = values
        epochs, max_steps = self._resumed.plan(args, per_epoch=per_epoch, max_steps=max_steps)
        return (epochs, per_epoch, *rest, max_steps)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        return super()._prepare_for_training(
            max_steps, self._train_loader, resume_from_checkpoint
        )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch_and_batches = super()._init_training_state(*args, **kwargs)
        # The loader is at its place already: transformers has nothing to skip.
        return epoch_and_batches if self._resumed is None else (self._resumed.epoch, 0)

    def _run_epoch(self, **values: Any) -> None:
        resumed = self._resumed
        if resumed is not None and resumed.batches_left and values["epoch"] == resumed.epoch:
            values["steps_in_epoch"] = resumed.batches_left
            values["num_update_steps_per_epoch"] = -(
                -resumed.batches_left // self.args.gradient_accumulation_steps
            )
        super()._run_epoch(**values)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._ranks.agree("the end of training")
        trainer_checkpoint.refuse_other_copies(
            self.args, self.model, self.optimizer, step=self.state.global_step
        )
        return super()._finalize_training(*args, **kwargs)

    def end(self) -> None:
        """As transformers', once every rank is here; wrappers that use the process group are freed before the group.

        A wrapper that is freed after its group waits, in gloo, for a thread that waits for Python: a rank would hang.
        """
        self.accelerator.wait_for_everyone()
        self.model_wrapped, self.deepspeed = self.model, None
        self.accelerator.free_memory()
        super().end()

    # ---- Saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._ranks.agree("the save of step", self.state.global_step)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AuditCallback):
                callback.check()
        loader, step = self._train_loader, self.state.global_step
        trainer_checkpoint.refuse_other_copies(self.args, self.model, self.optimizer, step=step)
        if isinstance(loader, TrainLoader) and self.args.should_save:
            trainer_checkpoint.save_place(
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}",
                step=step,
                loader=loader.state_dict(),
                global_batch=loader.sampler.global_batch,
            )
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        trainer_checkpoint.save_shards(
            Path(output_dir), self.model, self.optimizer, step=self.state.global_step
        )
        if self.args.should_save:
            (Path(output_dir) / _SCHEDULER).write_text(
                json.dumps(self.lr_scheduler.state_dict())
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_distributed_loading_by_transformers:
            trainer_checkpoint.load_shards(Path(resume_from_checkpoint), self.model, None)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_distributed_loading_by_transformers or checkpoint is None:
            # Where these files are missing, transformers begins with a new optimizer, without a word.
            if checkpoint and not self.is_deepspeed_enabled:
                trainer_checkpoint.refuse_weights_alone(Path(checkpoint))
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        trainer_checkpoint.load_shards(Path(checkpoint), self.model, self.optimizer)
        self.lr_scheduler.load_state_dict(
            json.loads((Path(checkpoint) / _SCHEDULER).read_text())
        )
        for group, rate in zip(
            self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate

    def _load_best_model(self) -> None:
        if self.is_distributed_loading_by_transformers:
            trainer_checkpoint.load_shards(
                Path(str(self.state.best_model_checkpoint)), self.model, None
            )
        else:
            super()._load_best_model()
