"""The forward of the run itself, probed before its first step: its depth, width, row length, dtype, kernels, adapters.

Some tokens of a micro-batch are changed, and no token that must not see them may move: causality at several places of
the row, documents, the other rows. Forward only, on the mesh; it leaves nothing behind but what the first step would
have allocated and compiled anyway.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.check.compare import FORWARD, FORWARD_BFLOAT16, FORWARD_FLOAT8
from threefold.data.order.permutation import seed_of
from threefold.errors import ConfigError
from threefold.model import noise
from threefold.model.build import resolved_on
from threefold.model.collectives import local_part
from threefold.model.context_parallel.positions import local_positions
from threefold.model.data_parallel import reshard
from threefold.model.head import below_head
from threefold.model.model import Model
from threefold.model.reduced import lengths_of

# No further places are looked at once the forwards have taken so long.
_MOST_S = 10.0
# A failure is reported as the first of these that fails: rows that are not kept apart fail the others too.
_PROMISES = {
    "finite": (
        "gives a number that is not finite",
        "numbers",
        "look at the weights that it begins with",
    ),
    "composition": (
        "lets a row see the other rows of its micro-batch",
        "rows that do not see one another: train.micro_batch and the mesh must not change the curve",
        "--train.micro_batch 1",
    ),
    "documents": (
        "lets a token see another document of its row",
        "documents that are kept apart, as data.document_mask promises",
        "--data.document_mask false",
    ),
    "causality": (
        "lets a token see later ones",
        "a causal model, at every place of its rows",
        "use another architecture, or shorter rows: this one would be trained to read its targets",
    ),
}


class _Change(NamedTuple):
    """The change in one row: tokens [first, end); results for those before and after must not move.

    Attributes:
        promise: which of `_PROMISES` is checked.
        boundary: where the row's second document begins; 0: it has one.
    """

    promise: str
    first: int
    end: int
    boundary: int = 0


def admit_full_size(
    model: Model, *, rows: int, seq_len: int, documents: bool
) -> tuple[str, str] | None:
    """Probes the forward of a model over micro-batches [rows, seq_len]; every rank calls it.

    Returns what was looked at and how, for the head of a run; None for a custom module, which may be anything.

    Raises:
        ConfigError: a token sees what it must not, or a number is not finite; on every rank.
    """
    if model.context is None or model.asked is None or model.architecture is None:
        return None
    begun, mesh = time.perf_counter(), model.mesh
    changes = _changes(seq_len, documents=documents, lengths=lengths_of(model.architecture))
    probe = _Probe(model, rows, seq_len, documents)
    with _untouched(model):
        probe.rows_apart()
        probe.round(0, changes)
        pair_s = mesh.share("a probe's time", lambda: probe.seconds)
        rounds = min(-(-len(changes) // probe.slots), 1 + int(_MOST_S / max(pair_s, 1e-6)))
        for number in range(1, rounds):
            probe.round(number, changes)
        if mesh.decide("full size", bool(probe.failures), any):
            # Of a router's near tie only the rounding of these very rows decides: other rows move other tokens.
            again = _Probe(model, rows, seq_len, documents, seed=1)
            again.rows_apart()
            for number in range(rounds):
                again.round(number, changes)
            probe.failures = {
                key: value for key, value in probe.failures.items() if key in again.failures
            }
    own = _first_failure([*key, *value] for key, value in probe.failures.items())
    failed = mesh.decide(
        "not at full size", own, lambda parts: _first_failure(part for part in parts if part)
    )
    if failed is not None:
        raise _refusal(model, failed, seq_len)
    num_cuts = len(
        {
            change.first
            for change in changes[: rounds * probe.slots]
            if change.promise == "causality"
        }
    )
    apart = [", documents apart"] * documents + [", rows apart"] * (rows > 1)
    how = f"probed from {num_cuts} places on{''.join(apart)}, finite; {time.perf_counter() - begun:.1f} s"
    return f"its own forward: causal to token {seq_len:,} of {seq_len:,}", how


def admit_first(model: Model, batch: Mapping[str, Tensor]) -> None:
    """As `admit_full_size`, of the largest first micro-batch of all ranks; every rank calls it.

    Raises:
        ConfigError: as `admit_full_size`.
    """
    own = [*batch["input_ids"].shape, int("document_ids" in batch)]
    rows, seq_len, documents = model.mesh.decide(
        "first rows", own, lambda parts: [*map(max, zip(*parts, strict=True))]
    )
    admit_full_size(model, rows=rows, seq_len=seq_len, documents=bool(documents))


def _first_failure(failures: Iterable[list[Any]]) -> list[Any] | None:
    """The failure of the promise that is first in the table, at the lowest token."""
    return min(
        failures, key=lambda failure: ([*_PROMISES].index(failure[0]), failure[1]), default=None
    )


def _refusal(model: Model, failure: list[Any], seq_len: int) -> ConfigError:
    promise, place, changed, figure = failure
    assert model.asked is not None and model.architecture is not None
    name = model.asked.model.name_or_path or model.architecture.model_type
    what, expected, fix = _PROMISES[promise]
    moved = (
        ""
        if promise == "finite"
        else f" moves by {figure:.1e} of its size when {changed} changes"
    )
    return ConfigError(
        f"{name!r} {what}, at its full size on {model.mesh.topology}: token {place:,} of {seq_len:,}{moved}",
        expected=expected,
        fix=fix,
    )


def _changes(seq_len: int, *, documents: bool, lengths: list[int]) -> list[_Change]:
    """All that is looked at, the most telling first."""
    quarter = max(1, seq_len // 4)
    three = max(1, 3 * seq_len // 4)
    apart = [_Change("documents", 0, place, place) for place in (three, quarter) if documents]
    cuts = [
        place
        for place in dict.fromkeys([seq_len - 1, quarter, three, *lengths])
        if 0 < place < seq_len
    ]
    last, *others = [_Change("causality", place, seq_len) for place in cuts] or [
        _Change("causality", 0, seq_len)
    ]
    return [last, *apart[:1], *others, *apart[1:]]


class _Probe:
    """Pairs of forwards over rows of which some tokens are changed.

    Attributes:
        slots: rows of all dp ranks, each with a different change.
        seconds: duration of the last pair.
        failures: by (promise, token): the change, and by how much of its size the token moved.
    """

    def __init__(
        self, model: Model, rows: int, seq_len: int, documents: bool, seed: int = 0
    ) -> None:
        assert model.asked is not None and model.architecture is not None
        self._model = model
        self._rows = rows
        self._seq_len = seq_len
        self._documents = documents
        self._seed = seed
        mesh, asked = model.mesh, model.asked
        self.slots, self.seconds = rows * mesh.dp_size, 0.0
        self.failures: dict[tuple[str, int], tuple[str, float]] = {}
        self._vocabulary = model.architecture.get_text_config().vocab_size
        self._compiled = resolved_on(mesh, asked, model.architecture).compiled.value
        narrow = FORWARD_BFLOAT16 if asked.model.dtype == "bfloat16" else FORWARD
        self._bound = FORWARD_FLOAT8 if asked.train.float8 != "none" else narrow
        self._places = local_positions(seq_len, cp_size=mesh.cp_size, cp_rank=mesh.cp_rank)

    def rows_apart(self) -> None:
        """A pair of forwards in which every second row is another one, and the rows between must stay as they are."""
        same = _Change("composition", self._seq_len, self._seq_len)
        other = _Change("causality", 0, self._seq_len)
        if self._rows > 1:
            self._pair("rows", [(same, other)[row % 2] for row in range(self._rows)])

    def round(self, number: int, changes: list[_Change]) -> None:
        """One pair of forwards; in the last round, slots that are left look at places in between."""
        mesh, seq_len = self._model.mesh, self._seq_len
        first = number * self.slots + mesh.dp_rank * self._rows
        own = changes[first : first + self._rows]
        generator = torch.Generator().manual_seed(
            seed_of("places", self._seed, number, mesh.dp_rank)
        )
        drawn = torch.randint(
            1, max(2, seq_len), (self._rows - len(own),), generator=generator
        ).tolist()
        self._pair(
            number,
            own + [_Change("causality", min(place, seq_len - 1), seq_len) for place in drawn],
        )

    def _pair(self, name: int | str, own: list[_Change]) -> None:
        """Checks what moves in rows [rows, seq_len], each with a different change."""
        begun, seq_len = time.perf_counter(), self._seq_len
        generator = torch.Generator().manual_seed(
            seed_of("full size", self._seed, name, self._model.mesh.dp_rank)
        )
        lowest = min(3, self._vocabulary - 1)
        ids = torch.randint(
            lowest, self._vocabulary, (self._rows, seq_len), generator=generator
        )
        other = lowest + (ids - lowest + 1) % (self._vocabulary - lowest)
        place = torch.arange(seq_len)
        limits = torch.tensor(
            [[change.first, change.end, change.boundary or seq_len] for change in own]
        )
        begin, end, boundary = (column[:, None] for column in limits.unbind(1))
        second = place >= boundary
        rows = {"input_ids": ids, "position_ids": place - boundary * second}
        if self._documents:
            rows["document_ids"] = second.long()
        changed = (place >= begin) & (place < end)
        before = self._hidden(rows)
        after = self._hidden({**rows, "input_ids": other.where(changed, ids)})
        moved = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        finite = before.isfinite().all(dim=-1) & after.isfinite().all(dim=-1)
        sees = ~changed[:, self._places].to(moved.device) & ~(moved <= self._bound.limit)
        sees &= (place < end)[:, self._places].to(moved.device) | (boundary < seq_len).to(
            moved.device
        )
        for row, token in (sees & finite).nonzero().tolist():
            self._failed(own[row].promise, token, own[row], moved[row, token].item())
        for row, token in (~finite).nonzero().tolist():
            self._failed("finite", token, own[row], 0.0)
        self.seconds = time.perf_counter() - begun

    def _failed(self, promise: str, token: int, change: _Change, moved: float) -> None:
        place = int(self._places[token])
        changed = (
            "another row"
            if promise == "composition"
            else f"what is in tokens {change.first + 1:,} to {change.end:,}"
        )
        self.failures.setdefault((promise, place + 1), (changed, moved))

    def _hidden(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The output below the head, float32 [rows, tokens of this cp rank, hidden]; else the logits."""
        model = self._model
        torch.manual_seed(
            seed_of("full size", *noise.places(model.mesh, model.tensor.sequence_group))
        )
        # Compiled layers have another graph without gradients, which the run never uses.
        with torch.set_grad_enabled(self._compiled), model.computing(rows) as local:
            of = "logits" if below_head(model.module) is None else "hidden_states"
            return model.outputs(local, of).values.detach()  # type: ignore[arg-type]


@contextmanager
def _untouched(model: Model) -> Iterator[None]:
    """Inside, adapters add something; afterwards all is as it was."""
    module = model.module
    ends = [
        local_part(weight) for name, weight in module.named_parameters() if ".lora_B." in name
    ]
    weights = [end.detach().clone() for end in ends]
    with noise.without_trace(module, model.mesh.device), torch.no_grad():
        for number, end in enumerate(ends):
            torch.manual_seed(number)
            end.add_(torch.randn_like(end), alpha=0.05)
        try:
            yield
        finally:
            for end, weight in zip(ends, weights, strict=True):
                end.copy_(weight)
            reshard(model.forward)
