"""A model on the mesh, as used by custom loops and `threefold train`.

A transformers causal language model on any mesh, or a custom module on the data ranks. A call returns whole logits
for whole rows on every rank. Training uses this rank's part instead (`computing`, `outputs`): rows [batch, sequence]
go in; their tokens, split over cp, come out with the whole vocabulary.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from threefold.config.schema import RATE_OF_RANDOM, Config
from threefold.errors import ConfigError, RunError, check_argument
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import join, sum_over_all
from threefold.model.context_parallel.attention import ContextParallel
from threefold.model.context_parallel.positions import gathered_positions, places_in_documents
from threefold.model.data_parallel import replicate, reshard
from threefold.model.gradient_sums import FloatSums, GradientSums
from threefold.model.head import Outputs, below_head, longest_row
from threefold.model.head_gradient import Loss
from threefold.model.tensor_parallel.plan import TensorParallelism

if TYPE_CHECKING:
    from threefold.model.working_copy import WorkingCopy

OutputsOf = Literal["logits", "hidden_states", "log_probabilities"]
_ROWS = ("input_ids", "position_ids", "document_ids", "padding")


class LossBatch(dict[str, Tensor]):
    """A batch as passed to a custom loss: this rank's part, from which a model that the loss calls finds the whole.

    Attributes:
        whole: the same entries with all tokens of each row, on every cp rank.
    """

    whole: Mapping[str, Tensor]

    def __init__(self, part: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        super().__init__(part)
        self.whole = whole

    def whole_of(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The whole rows that these are a part of; None if they are whole rows already.

        Raises:
            ConfigError: they are neither.
        """
        names = {id(values): name for name, values in self.items()}
        if all(id(values) in names for values in rows.values()):
            return {name: self.whole[names[id(values)]] for name, values in rows.items()}
        length = self.whole["input_ids"].shape[1]
        if all(values.ndim > 1 and values.shape[1] == length for values in rows.values()):
            return None
        raise ConfigError(
            f"a loss calls a model with rows of {rows['input_ids'].shape[1]} tokens, of {length} in the batch",
            expected="entries of the batch itself, whose logits are then this cp rank's, or whole rows: no rank knows "
            "the rest of a row that was changed in part",
            fix="model(input_ids=batch['input_ids']), or make the rows of batch.whole['input_ids']",
        )


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model on the mesh.

    Attributes:
        forward: the callable (the model, or its data-parallel wrapper).
        module: the model itself, whose parameter names a checkpoint uses.
        mesh: the mesh that it is on.
        tensor: what was split over tp.
        context: the cp axis: splits batches, owns masks; None for a custom module.
        autocast: dtype that operations of a custom module are cast to; None: float32, or `model.precision`.
        choices: (what was chosen, why), to be printed.
        automatic_rate: the default peak learning rate, for random or pretrained weights.
        asked, architecture: what it was built from; None for a custom module.
        savers: writers of its checkpoints (`threefold.save`), kept from one to the next.
        saved: for each folder of a custom loop, the last step saved there or loaded from there.
        locks: for each such folder, the lock that keeps other processes from saving there; on rank 0.
        trained: what its checkpoints hold besides adapters, by names: what was ever trained; of a custom module all.
        sums: how its gradients and losses are added (`train.reduce`); None: in floating point.
        working: the copy of its weights with which it computes; None: it computes with its parameters.
        before_first_step: called with this and a custom loop's first micro-batch, to probe a forward of its size.
    """

    forward: nn.Module
    module: Any
    mesh: Mesh
    tensor: TensorParallelism = field(default_factory=TensorParallelism)
    context: ContextParallel | None = None
    autocast: torch.dtype | None = None
    choices: tuple[tuple[str, str], ...] = ()
    automatic_rate: float = RATE_OF_RANDOM
    asked: Config | None = None
    architecture: PretrainedConfig | None = None
    savers: dict[Any, Any] = field(default_factory=dict)
    saved: dict[Path, int] = field(default_factory=dict)
    locks: dict[Path, Any] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    sums: GradientSums = None  # type: ignore[assignment]  # set below
    working: WorkingCopy | None = None
    before_first_step: Callable[[Model, Mapping[str, Tensor]], None] | None = None

    def __post_init__(self) -> None:
        if self.sums is None:
            object.__setattr__(self, "sums", FloatSums(self.mesh))

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.module.parameters())
        return f"Model({type(self.module).__name__}, {size:,} parameters, {self.mesh.topology})"

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.mesh.device

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Refused: the set of trained parameters is fixed before the optimizer is made."""
        raise ConfigError(
            f"model.requires_grad_({requires_grad})",
            expected="parameters frozen by name; a model that is not trained is called under torch.no_grad()",
            fix="threefold.freeze(model, ['embed_tokens'])",
        )

    def load_state_dict(self, *state: Any, **settings: Any) -> NoReturn:
        """Refused: ranks hold parts of the tensors."""
        raise ConfigError(
            "model.load_state_dict(...)",
            expected="weights in files, of which each rank reads its part",
            fix="threefold.load_model(FOLDER, mesh=mesh); or threefold.load(FOLDER, model=model), of a checkpoint",
        )

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """The logits of whole rows, float32 [rows, sequence, vocabulary], the same on all cp and tp ranks.

        Every rank calls it, with the rows of its dp rank: `input_ids` [rows, sequence], and optionally `position_ids`
        and `document_ids` as in a batch (`padding` changes no logits). Through `TrainStep` a step never holds the
        logits of another cp rank's tokens; and only `TrainStep` completes the gradients of a split model.

        In a custom loss it may be called with entries of the batch, and then returns the logits of this rank's tokens,
        like those that the loss gets as outputs.

        A custom module is called directly, and its outputs are returned unchanged.

        Raises:
            DataError: cp or tp ranks pass different rows; on every rank. RunError: on backward through the result.
        """
        if self.context is None:
            with self.casting():
                outputs = self.forward(*arguments, **inputs)
            if not torch.is_grad_enabled():
                reshard(self.forward)
            for values in tree_leaves(outputs):
                _for_scoring(values)
            return outputs
        named = {**dict(zip(_ROWS, arguments, strict=False)), **inputs}
        rows = {
            name: rows for name, rows in named.items() if rows is not None and name != "padding"
        }
        if unknown := sorted(rows.keys() - set(_ROWS)):
            raise ConfigError(
                f"the model is called with {unknown[0]}",
                expected=f"{', '.join(_ROWS)}: whole rows, whose documents document_ids number",
                fix=f"leave {unknown[0]} out"
                + ("; document_ids keep documents apart" if "mask" in unknown[0] else ""),
            )
        if not isinstance(ids := rows.get("input_ids"), Tensor) or ids.ndim != 2:
            raise ConfigError(
                "the model is called without input_ids",
                expected="[rows, sequence]",
                fix="input_ids=ids",
            )
        cp = self.mesh.cp_size
        part = self.mesh.losses[-1] if self.mesh.losses else None
        whole = part.whole_of(rows) if part is not None and cp > 1 else None
        if whole is None:

            def read() -> tuple[list[dict[str, Tensor]], int]:
                self.refuse_rows(rows)
                return [rows], 0

            # An error of one rank is raised on all that share its rows: none waits for it.
            if cp * self.mesh.tp_size > 1:
                self.mesh.agree("model(...)", 0, read)
            else:
                read()
            self.trust_no_weight()
        with self.computing(whole or rows) as local:
            logits = self.outputs(local).values
        if not torch.is_grad_enabled():
            reshard(self.forward)
        if whole is not None or (group := self.mesh.group("cp")) is None:
            return _for_scoring(logits)
        joined = join(logits, group, dim=1, scale=cp)
        return _for_scoring(
            joined[
                :, gathered_positions(joined.shape[1], cp_size=cp).argsort().to(joined.device)
            ]
        )

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Operations inside are cast as the model's dtype asks."""
        with torch.autocast(
            self.mesh.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            yield

    @contextmanager
    def computing(self, rows: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """This rank's part of rows [batch, sequence, ..], split over cp, on the device; run backward inside.

        Without `position_ids` they count from 0, in each document if there are `document_ids`.
        """
        assert self.context is not None
        moved = {
            name: values.to(self.mesh.device, non_blocking=True)
            for name, values in rows.items()
        }
        ids = moved["input_ids"]
        if "position_ids" not in moved:
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            documents = moved.get("document_ids")
            moved["position_ids"] = (
                places if documents is None else places_in_documents(documents)
            )
        split = {
            name: values for name, values in moved.items() if values.shape[:2] == ids.shape
        }
        with (
            self.weights_in_place(),
            self.context.batch(split, rows.get("document_ids")) as local,
        ):
            yield LossBatch({**moved, **local}, moved)

    @contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Inside, the module has the weights with which it computes; run forward and backward inside."""
        with self.working.in_place() if self.working is not None else nullcontext():
            yield

    def trust_no_weight(self) -> None:
        """For programs that may have changed weights since the last step, in any way."""
        if self.working is not None:
            self.working.forget()

    def outputs(
        self,
        local: Mapping[str, Tensor],
        of: OutputsOf = "logits",
        *,
        token_loss: Loss | None = None,
        routers: bool = False,
    ) -> Outputs:
        """The model's outputs for this rank's tokens, float32, the same on all tp ranks, and its routers' logits.

        Args:
            token_loss: for `log_probabilities`: the loss of a token is minus the log probability of its label.

        Returns:
            `logits` [rows, sequence / cp, vocabulary], `hidden_states` [rows, sequence / cp, hidden], or the
            `log_probabilities` of the labels [rows, sequence / cp], 0 where a label is -100. Each tp rank computes the
            same loss from them; its gradient counts once.
        """
        targets = (
            {"labels": local["labels"], "token_loss": token_loss}
            if of == "log_probabilities"
            else {}
        )
        with self.casting():
            # Not through DDP, which would wait for a backward: these gradients are averaged once a step.
            called = (
                self.module
                if isinstance(self.forward, DistributedDataParallel)
                else self.forward
            )
            outputs: Outputs = called(
                **arguments_of(local), **targets, outputs=of, output_router_logits=routers
            )
        values = outputs.values.float()
        start = self.tensor.vocabulary_start
        group = self.mesh.group("tp")
        if of == "logits" and group is not None and start is not None:
            total = self.module.get_output_embeddings().weight.shape[0]
            values = join(values, group, dim=-1, total=total)
        return Outputs(values, outputs.router_logits)

    def own_outputs(self, batch: Mapping[str, Any]) -> Any:
        """The outputs of a custom module for the entries of a batch that its forward takes by name."""
        parameters = inspect.signature(self.module.forward).parameters
        takes = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        entries = {name: values for name, values in batch.items() if name in takes}
        if not entries:
            raise ConfigError(
                f"the batch has {', '.join(map(repr, batch)) or 'no entries'}; {type(self.module).__name__}.forward "
                f"takes {', '.join(sorted(takes)) or 'none by name'}",
                expected="entries named as forward's arguments; the others go to the loss only",
                fix=f"batch = {{{min(takes)!r}: ..., 'labels': ...}}"
                if takes
                else "name forward's arguments",
            )
        with self.casting():
            return self.forward(**entries)

    def refuse_strange(self, name: str, ids: Tensor, besides: int | None = None) -> None:
        """ConfigError for ids outside the vocabulary: with tp, no rank's part would contain them."""
        size = self.config.get_text_config().vocab_size
        strange = ids[((ids >= size) | (ids < 0)) & (ids != besides)]
        if len(strange):
            raise ConfigError(
                f"the batch has {int(strange[0])} among its {name}",
                expected=f"ids from 0 to {size - 1}, as the model's vocabulary has"
                + (f", and {besides} where nothing is trained on" if besides else ""),
                fix="use the tokenizer of the model",
            )

    def refuse_rows(self, rows: Mapping[str, Tensor], look: bool = False) -> None:
        """ConfigError for rows that the mesh cannot split, unknown ids, overlong texts; `look` waits for a device."""
        if look or rows["input_ids"].is_cpu:
            self.refuse_strange("input_ids", rows["input_ids"])
        length, places = rows["input_ids"].shape[1], rows.get("position_ids")
        if places is None and (documents := rows.get("document_ids")) is not None:
            places = places_in_documents(documents)
        # Values on a device are not waited for.
        longest = length if places is None else int(places.max()) + 1 if places.is_cpu else 0
        if 0 < self.positions < longest:
            # Dynamic rotary factors would be those of the longest text so far, which differs between ranks.
            raise ConfigError(
                f"the batch has a text of {longest} tokens, but the model supports at most {self.positions} positions",
                expected="rows, or documents in them, that are no longer than the model's max_position_embeddings",
                fix=f"rows of at most {self.positions} tokens",
            )
        cp, tp = self.mesh.cp_size, self.mesh.tp_size
        shared = self.tensor.sequence_group is not None
        multiple = (2 * cp if cp > 1 else 1) * (tp if shared else 1)
        if length % multiple:
            raise ConfigError(
                f"the batch has rows of {length} tokens",
                expected=f"a multiple of {multiple} on {self.mesh.topology}"
                + (": each cp rank takes two equal chunks" if cp > 1 else "")
                + (f"; {tp} tp ranks share the tokens" if shared else ""),
                fix=f"pad the rows to {-(-length // multiple) * multiple} tokens, with labels of -100",
            )

    @cached_property
    def positions(self) -> int:
        """Length of the longest text that the model has positions for; 0: its config names none."""
        return longest_row(self.module.config, self.module)

    @property
    def config(self) -> Any:
        """The model's transformers config, or the `config` attribute of a custom module."""
        return self.module.config

    def refuse_outputs(self, of: str, loss: object, step: str) -> None:
        """ConfigError if a step with this loss requires one, or the model lacks the outputs that it asks for."""
        if self.context is None and loss is None:
            raise ConfigError(
                f"a {type(self.module).__name__} has no built-in loss",
                expected="for a custom module, a function of its outputs and the batch",
                fix=f"threefold.{step}(model, loss=lambda outputs, batch: (losses.sum(), losses.numel()))",
            )
        check_argument(
            "loss",
            loss,
            loss is None or callable(loss),
            expected="a function of outputs and batch that returns a sum and a count",
            fix="loss=lambda outputs, batch: (losses.sum(), losses.numel())",
        )
        if of not in get_args(OutputsOf):
            named = " or ".join(map(repr, get_args(OutputsOf)))
            raise ConfigError(
                f"loss_on = {of!r}", expected=named, fix="loss_on='logits'   (the default)"
            )
        if of == "logits":
            return
        if self.context is None or (of == "hidden_states" and below_head(self.module) is None):
            raise ConfigError(
                f"loss_on = {of!r}, but {type(self.module).__name__} has no model below a head",
                expected="a causal language model; the loss of a custom module gets its outputs",
                fix="leave loss_on out",
            )

    def sum_over_context(self, values: Tensor) -> Tensor:
        """The sum of the cp ranks' tensors, on each of them; differentiable. Every cp rank calls it.

        For losses that need a sum over a whole row or document of which a rank holds only some tokens: sum over those,
        then over the cp ranks. Each cp rank may return the loss of it, and the count: both are counted on each.
        """
        group = self.mesh.group("cp")
        return values if group is None else sum_over_all(values, group)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, as this rank holds them (DTensors where they are split); for a custom optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by their names in the whole model, which are the same on every mesh."""
        reshard(self.module)  # a call of the module by itself may have left it gathered
        yield from self.module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors by their names in the whole model: DTensors if FSDP2 or tp split them, else whole."""
        return dict(self.module.state_dict())

    def train(self, mode: bool = True) -> Model:
        self.module.train(mode)
        return self

    def eval(self) -> Model:
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the module is in eval mode; afterwards each layer is back in its former mode, even a frozen norm."""
        training = [each for each in self.module.modules() if each.training]
        self.eval()
        try:
            yield
        finally:
            for each in training:
                each.training = True

    def generate(self, input_ids: Tensor, *, seed: int = 0, **options: Any) -> Tensor:
        """transformers' `generate`: [rows, length] of this dp rank's ids -> [rows, length + new ones].

        Every rank calls it; the cp and tp ranks of a dp rank pass the same prompts and answer them together, each tp
        rank with the cache of its heads. Options are transformers': do_sample, max_new_tokens and others; `seed` is for
        the draws of each dp rank and leaves the ranks' own random states alone.

        Raises:
            ConfigError: a custom module, or refused by transformers; on every rank. DataError: cp or tp ranks pass
                different prompts.
        """
        return _public("generate")(self, input_ids, seed=seed, **options)

    def save_pretrained(self, folder: str | Path, *, verify: bool | None = None) -> Any:
        """Writes the weights as a Hugging Face folder, streamed, and reloads it to equal logits; every rank calls it.

        All ranks must see the folder. Save a tokenizer with its own `save_pretrained`.

        Args:
            verify: reload and compare logits; None: only if the model fits into the free memory of rank 0.
        """
        return _public("save_pretrained")(self, Path(folder), verify=verify)


def freeze(model: Model, patterns: Sequence[str]) -> list[str]:
    """Excludes parameters whose names match one of the regular expressions from training; returns their names.

    Every rank calls it, after `load_model` and before the optimizer is made. Checkpoints still contain them.

    Raises:
        ConfigError: a pattern matches no name, or nothing is left to train.
    """
    check_model(model)
    named = dict(model.named_parameters())
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        _refuse_no_expression(pattern)
        if not any(re.search(pattern, name) for name in named):
            raise ConfigError(
                f"freeze: no parameter has a name that {pattern!r} matches",
                expected=f"a regular expression that matches names such as {', '.join([*named][:3])}",
                fix="[name for name, _ in model.named_parameters()]   lists them",
            )
        for name, parameter in named.items():
            if re.search(pattern, name):
                parameter.requires_grad_(False)
    frozen = [name for name, each in named.items() if not each.requires_grad]
    if len(frozen) == len(named):
        raise ConfigError(
            "freeze: nothing is left to train",
            expected="fewer patterns",
            fix="freeze(model, ['embed'])",
        )
    return frozen


def _refuse_no_expression(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"freeze: {pattern!r} is not a regular expression: {error}",
            expected="a regular expression that matches names of parameters",
            fix=f"freeze(model, [{re.escape(str(pattern))!r}])",
        ) from None


def check_model(model: object) -> None:
    """ConfigError unless it is a Model, as every call that works on the mesh requires."""
    check_argument(
        "model",
        model,
        isinstance(model, Model),
        expected="a threefold.Model: it knows how the mesh splits the parameters",
        fix="model = threefold.load_model(..., mesh=mesh), which also takes an nn.Module",
    )


def wait_for_trained(model: Model) -> None:
    """Makes DDP wait for the gradients of the parameters trained now, not of those trained when it was made."""
    ddp = model.forward
    if isinstance(ddp, DistributedDataParallel) and ddp.trained != [
        each.requires_grad for each in model.parameters()
    ]:
        object.__setattr__(model, "forward", replicate(model.module, model.mesh))


def _for_scoring(values: Any) -> Any:
    """The same, but backward raises: the gradients would be of this rank's rows, or of a part of them, alone."""
    if isinstance(values, Tensor) and values.grad_fn is not None:
        values.register_hook(_refuse_backward)
    return values


def _refuse_backward(gradient: Tensor) -> None:
    raise RunError(
        "backward through what model(...) returned",
        expected="threefold.TrainStep, which alone sums the gradients of all ranks; calling a model is for scoring",
        fix="step = threefold.TrainStep(model, loss=loss); step(batch)   (in a loss, call other models under "
        "torch.no_grad())",
    )


def _public(name: str) -> Any:
    """A function of a module that imports this one, looked up when called, as by `import threefold`."""
    return getattr(sys.modules["threefold"], name)


def arguments_of(local: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of a causal language model for this rank's part of a batch."""
    return {
        "input_ids": local["input_ids"],
        "position_ids": local["position_ids"],
        # Ones keep transformers from inferring packed documents from the positions; `context` has the masks.
        "attention_mask": torch.ones_like(local["input_ids"]),
        "use_cache": False,
    }
