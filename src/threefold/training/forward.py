"""One forward of a micro-batch, with backward inside it: to the sums of our loss, or of a custom one.

A custom loss is a function (outputs, batch) -> (sum, count) of this rank's part of a batch. The loss of a step is
the sum of the sums over the dp x cp ranks and all micro-batches, divided by the sum of the counts. A loss with an
attribute `measures`, names, gives a third: a tensor [measures] of further sums, reported as means of the same count.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from threefold.errors import ConfigError, OtherRankError, RunError, check_argument
from threefold.mesh.mesh import Mesh
from threefold.model import noise
from threefold.model.collectives import is_sharded
from threefold.model.context_parallel.positions import local_positions
from threefold.model.gradient_sums import refuse_direct
from threefold.model.head import Sums
from threefold.model.model import Model, OutputsOf, arguments_of, check_model
from threefold.model.user_module import mixes_rows
from threefold.plan import choices
from threefold.training.loss import TokenLoss

Batch: TypeAlias = dict[str, Tensor]
# (outputs, this rank's part of the batch) -> (sum of the loss, what it is divided by), scalars of this rank; then, of a
# loss that measures more, sums of that, [measures].
OwnLoss: TypeAlias = Callable[
    [Any, Batch], tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Tensor]
]

_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids")


class OwnSums(NamedTuple):
    """The result of a custom loss for a micro-batch.

    Attributes:
        objective: its sum, to go backward from; through all outputs, with no gradient for those that it left out.
        totals: [4 + measures] float64, detached: the sum, the count, 1 (infinite if the loss raised), how many rows or
            groups of them if the count is 1 (else not a number), and the measures.
        of_rows: [rows]: the sum by rows, of a loss that has it (`of_rows`).
    """

    objective: Tensor
    totals: Tensor
    router_logits: tuple[Tensor, ...]
    of_rows: Tensor | None = None


@contextmanager
def forward_sums(
    model: Model, batch: Batch, token_loss: TokenLoss, *, routers: bool = False
) -> Iterator[Sums]:
    """Sums over this rank's target tokens of a batch [batch, sequence]; backward belongs inside the `with`."""
    with model.computing({name: batch[name] for name in _PER_TOKEN if name in batch}) as local:
        with model.casting():
            sums: Sums = model.forward(
                labels=local["labels"],
                token_loss=token_loss,
                output_router_logits=routers,
                **arguments_of(local),
            )
        yield sums


@contextmanager
def forward_own(
    model: Model,
    batch: Batch,
    loss: OwnLoss,
    *,
    of: OutputsOf,
    routers: bool = False,
    failures: list[Exception] | None = None,
    by_rows: bool = False,
    twice: bool = False,
) -> Iterator[OwnSums]:
    """The sums of a custom loss over this rank's part of a batch; backward belongs inside the `with`.

    Args:
        failures: takes what the loss raises, whose sums are then 0: other ranks wait for this one in the backward.
        by_rows: refuse a part of a group of `loss.rows_together` rows: its other rows are elsewhere.
        twice: refuse, by second derivatives, a loss that turns out to be no sum over these groups.
    """
    # For logits of tokens, second derivatives would take several times the memory.
    by_tokens = of == "logits" or model.mesh.cp_size > 1
    twice &= model.context is None or not by_tokens
    sums = partial(_sums, mesh=model.mesh, failures=failures, by_rows=by_rows, twice=twice)
    if model.context is None:
        device = model.mesh.device
        moved = dict(batch)
        for name, each in moved.items():
            if isinstance(each, Tensor):
                moved[name] = each.to(device, non_blocking=True).contiguous()
        yield sums(model.own_outputs(moved), loss, moved)
        return
    with model.computing(batch) as local:
        token_loss = token_loss_of(model) if of == "log_probabilities" else None
        outputs = model.outputs(local, of, token_loss=token_loss, routers=routers)
        yield sums(outputs.values, loss, local, router_logits=outputs.router_logits)


def measures_of(loss: OwnLoss | None) -> tuple[str, ...]:
    """The names of a custom loss's results beyond its sum and count."""
    return getattr(loss, "measures", ())


def _sums(
    outputs: Any,
    loss: OwnLoss,
    batch: Batch,
    *,
    mesh: Mesh,
    router_logits: tuple[Tensor, ...] = (),
    failures: list[Exception] | None,
    by_rows: bool,
    twice: bool,
) -> OwnSums:
    measured = nothing = torch.zeros(
        len(measures_of(loss)), dtype=torch.float64, device=mesh.device
    )
    tensors = (each for each in batch.values() if isinstance(each, Tensor) and each.ndim)
    together = getattr(loss, "rows_together", 1)
    rows = next(map(len, tensors), together)
    mesh.losses.append(batch)
    try:
        inputs = tree_map(_alias, outputs) if twice else outputs
        answer: Any = loss(inputs, batch)
        if len(nothing):
            *answer, measured = answer
            measured = measured.to(nothing)
        total, count = _checked(answer)
        part = 1.0
        if (by_rows and rows % together) or (
            twice and _mixes_rows(total, inputs, rows, together)
        ):
            raise ConfigError(
                "the loss mixes rows: the gradients of some depend on the outputs for others in the micro-batch",
                expected="a sum over rows: which rows share a micro-batch differs between meshes; nothing was updated",
                fix="put what belongs together into one row, or declare N consecutive rows: loss.rows_together = N",
            )
        if torch.is_grad_enabled() and not total.requires_grad and total.any():
            raise _without_gradient()  # of rows that add nothing, it may be 0
    except Exception as error:
        if failures is None or mesh.world_size == 1:
            raise
        failures.append(error)
        total, measured = torch.zeros(()), nothing
        count, part = 0, math.inf
    finally:
        mesh.losses.pop()
    # Every rank goes backward through the whole model, whatever its part of the loss depends on: there are collectives.
    objective = total.to(mesh.device, torch.float32 if total.dtype != torch.float64 else None)
    for leaf in _leaves(outputs):
        if leaf.requires_grad:
            objective = objective + leaf.reshape(-1)[:0].sum().to(objective.dtype)
    if torch.is_grad_enabled() and not objective.requires_grad:
        raise _without_gradient()
    count = torch.as_tensor(count, dtype=torch.float64, device=mesh.device)
    of_one = torch.where(count == 1, rows / together, math.nan)
    totals = torch.stack([total.to(count), count, torch.full_like(count, part), of_one])
    totals = torch.cat([totals, measured]).detach()
    return OwnSums(objective, totals, router_logits, getattr(loss, "of_rows", None))


def _mixes_rows(total: Tensor, outputs: Any, rows: int, together: int) -> bool:
    """Whether gradients of every other row (or group) change with those between: as second derivatives say."""
    between = torch.arange(rows) // together % 2 > 0
    reached = [leaf for leaf in _leaves(outputs) if leaf.requires_grad and leaf.ndim]
    leaves = [leaf for leaf in reached if len(leaf) == rows]
    ends, nodes = {leaf.grad_fn for leaf in reached}, [total.grad_fn]
    for node in nodes:
        if node and node.next_functions and node not in ends:
            # torch's own nodes have names ending in a number. Others may change saved tensors, or send: they run once.
            if node.name()[-1] > "9":
                return False
            nodes += [each for each, _ in node.next_functions if each not in nodes]
    with suppress(Exception):  # what cannot be differentiated twice is not judged
        first = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        others = sum(each[~between].square().sum() for each in first)
        second = torch.autograd.grad(others, leaves, retain_graph=True, materialize_grads=True)  # type: ignore[arg-type]
        return any(
            bool((each[between].abs() > _SAME * each.abs().max()).any()) for each in second
        )
    return False


def _alias(leaf: Any) -> Any:
    """Where gradients of a part of the graph end: those of a model's outputs call hooks."""
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _without_gradient() -> ConfigError:
    return ConfigError(
        "the loss has no gradient: it depends on no parameter",
        expected="a sum that is computed from the outputs, with their gradients",
        fix="leave out .detach(), .item() and torch.no_grad() in the loss and in forward",
    )


def _leaves(outputs: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def refuse_means(parts: float, rows: float) -> None:
    """ConfigError if a loss gave 1 as its count of each of several micro-batches (else `rows` is not a number)."""
    if rows > parts > 1:
        raise _no_sum(
            f"gave 1 as its count for each of {parts:g} micro-batches, with {rows:g} rows in all"
        )


def _no_sum(problem: str) -> ConfigError:
    return ConfigError(
        f"the loss {problem}",
        expected="(sum, count): the sum over this rank's part of the batch, a scalar tensor, and how many terms it has "
        "(a mean could not be combined with those of other ranks and micro-batches)",
        fix="return losses.sum(), losses.numel()",
    )


def _checked(answer: Any) -> tuple[Tensor, Tensor | float]:
    """The sum and the count, if they are that.

    Raises:
        ConfigError: the loss gave something else.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise _no_sum(f"gave {_described(answer)}")
    if (
        not isinstance(total := answer[0], Tensor)
        or isinstance(total, DTensor)
        or total.ndim
        or not total.is_floating_point()
    ):
        raise _no_sum(f"gave {_described(answer[0])} as its sum")
    count: Any = answer[1]
    if not (
        _is_amount(count)
        or (isinstance(count, Tensor) and not count.ndim and not count.is_complex())
    ):
        raise _no_sum(f"gave {_described(count)} as its count")
    return total, count


def _is_amount(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _described(value: Any) -> str:
    if isinstance(value, DTensor):
        return "a DTensor, whose parts are on other ranks too,"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}" + (
        f" of {len(value)}" if isinstance(value, tuple | list) else ""
    )


def token_loss_of(
    model: Model, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> TokenLoss:
    """The loss of tokens whose logits this model gives on this rank."""
    asked = "auto" if model.asked is None else model.asked.train.fused_loss
    return TokenLoss(
        group=model.mesh.group("tp"),
        vocabulary_start=model.tensor.vocabulary_start,
        vocabulary=model.module.config.get_text_config().vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        fused=choices.fused_loss(asked, choices.Device.here(model.device.type)).value,
    )


def counted_tokens(batch: Batch, mesh: Mesh) -> Tensor:
    """[rows x sequence / cp] of this rank's tokens in the order in which it holds them: 1.0, or 0.0 for padding."""
    rows, sequence = batch["input_ids"].shape
    if (padding := batch.get("padding")) is None:
        return torch.ones(rows * sequence // mesh.cp_size, device=mesh.device)
    own = local_positions(sequence, cp_size=mesh.cp_size, cp_rank=mesh.cp_rank)
    return (
        (~padding[:, own.to(padding.device, non_blocking=True)])
        .flatten()
        .to(mesh.device, torch.float32, non_blocking=True)
    )


def warm_up_buckets(model: Model, *, rows: int, seq_len: int) -> None:
    """One backward over [rows, seq_len] tokens, as a micro-batch has, without any trace. Every rank calls it.

    torch's DistributedDataParallel lays out its buckets again after the first backward, in the order in which the
    gradients came. The place of a gradient in a bucket decides in which order the ranks' parts of it are added. Without
    this, the first step of a resumed run on more than two ranks would have other sums than that of an unbroken run.
    """
    if not isinstance(model.forward, DistributedDataParallel):
        return
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    batch = {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": torch.arange(seq_len).expand(rows, -1),
    }
    with (
        noise.without_trace(model.module, model.device),
        forward_sums(model, batch, token_loss_of(model)) as sums,
    ):
        sums.objective.backward()
    model.module.zero_grad(set_to_none=True)


# Relative: tp ranks have the same outputs bit for bit, and compute the same of them but for the order of sums.
_SAME = 1e-4


def refuse_unequal(
    totals: Tensor, ended: Tensor, failures: Sequence[Exception], mesh: Mesh
) -> None:
    """Compares this rank's [sum, count] with those of its tp ranks, and looks at the count of the global batch.

    Args:
        ended: the second to fourth of `OwnSums.totals`, over the dp x cp ranks and all micro-batches.
        failures: what the loss raised on this rank.

    Raises:
        RunError: tp ranks differ, or the count is not a number, or negative, or the loss raised on another rank; on
            every rank. What it raised on this one.
    """
    failed = 2.0 * ended[1].isinf()
    if mesh.group("tp") is not None:
        both = torch.cat([totals, -totals])
        mesh.all_reduce("tp", both, dist.ReduceOp.MAX)
        highest, lowest = both[:2], -both[2:]
        apart = ((highest - lowest) > _SAME * highest.abs().maximum(lowest.abs())).any()
        failed = failed + apart
        mesh.all_reduce("world", failed, dist.ReduceOp.MAX)
        if failed == 1:
            span = f"{lowest[0].item():.8g} to {highest[0].item():.8g}"
            raise RunError(
                f"tp ranks compute different losses from the same outputs: {span} here",
                expected="a function of the outputs and the batch alone, the same on all tp ranks; nothing was updated",
                fix="draw the loss's random numbers from a torch.Generator with the same seed on every rank",
            )
    if failed.item():
        error = failures[0] if failures else None
        what = mesh.decide(
            "loss", error and " ".join(f"{type(error).__name__}: {error}".split()), _who_raised
        )
        if error is not None:
            raise error
        raise OtherRankError(
            what,
            expected="a loss that raises on all ranks or on none; nothing was updated, and all can take the next step",
            fix="see that rank's traceback; drop rows that the loss cannot handle before they reach the step",
        )
    number = ended[0].item()
    if not (math.isfinite(number) and number >= 0):
        raise RunError(
            f"the loss has the count {number} over all ranks",
            expected="how many terms its sum has: a number that is not negative; nothing was updated",
            fix="return losses.sum(), losses.numel()",
        )


def watch_shards(model: Model) -> None:
    """Lets a gradient that reaches a parameter in shards, and not by FSDP2, raise in every backward from now on."""
    for each in model.parameters():
        if each.requires_grad and is_sharded(each):
            each.register_hook(refuse_direct)


def _who_raised(texts: list[str | None]) -> str:
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    return f"the loss raised on rank {rank}: {text}"


def check_settings(model: Model, grad_clip: float, micro_batch: int | None) -> None:
    """ConfigError if a step cannot be made of these."""
    check_model(model)
    check_argument(
        "grad_clip",
        grad_clip,
        isinstance(grad_clip, int | float) and 0 <= grad_clip < math.inf,
        expected="a norm, or 0 for none",
        fix="grad_clip=1.0",
    )
    check_argument(
        "micro_batch",
        micro_batch,
        micro_batch is None or (type(micro_batch) is int and micro_batch >= 1),
        expected="rows in one forward",
        fix="micro_batch=1",
    )
    mixing = mixes_rows(model.module) if micro_batch and model.context is None else None
    if mixing is not None:
        raise ConfigError(
            f"micro_batch = {micro_batch}, but {mixing} mixes the rows of a micro-batch",
            expected="rows that do not see one another: the number of micro-batches would change the curve",
            fix="leave micro_batch out, or nn.GroupNorm in its place",
        )


def checked_rate(name: str, value: object) -> float:
    """A rate that is a number from 0 on; ConfigError for anything else."""
    check_argument(
        name,
        value,
        _is_amount(value),
        expected="a number that is not negative",
        fix=f"{name}=1e-3",
    )
    return float(value)  # type: ignore[arg-type]
