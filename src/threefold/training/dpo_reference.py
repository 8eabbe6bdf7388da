"""A frozen reference's log-probabilities of pairs: computed once by all ranks, kept in a file, looked up in each step.

The file holds a line of JSON (its inputs, and a checksum) and then float64 sums: one per document of the packed rows,
in their order. It belongs to these rows, these weights (all their bytes) and this compute dtype. Runs on
the same ones share it in the cache, and a run keeps its own copy, from which it resumes on any mesh.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.arrays import Float64
from threefold.checkpoint.seal import checksum_of
from threefold.data.rows.best_fit import PaddedRows
from threefold.data.sampling.loader import evaluation_batches
from threefold.errors import CheckpointError, RunError, shell_word
from threefold.jsonl import write_whole
from threefold.model.data_parallel import reshard
from threefold.model.model import Model
from threefold.training.dpo_loss import of_documents
from threefold.training.forward import Batch, token_loss_of

_KIND = "threefold reference 1"
_TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class ReferenceIdentity:
    """The inputs that a reference belongs to.

    Attributes:
        rows: fingerprint of packed rows of pairs.
        weights: digest of all weights (`digest_of`).
        dtype: type of the computation.
    """

    rows: str
    weights: str
    dtype: str

    @property
    def shared_name(self) -> str:
        """Its file's name among those of all runs."""
        return f"{checksum_of(json.dumps(vars(self)).encode())}.reference"

    @property
    def name(self) -> str:
        """Its file's name in the folder of a run, which has one reference for its rows."""
        return f"{self.rows}.reference"


@dataclass(frozen=True)
class Kept:
    """The reference of the rows of one source: float64 [documents of all rows], the same on every rank."""

    identity: ReferenceIdentity
    values: Float64

    def keep(self, folder: Path) -> None:
        """Writes it as a run's own; rank 0 calls it."""
        _write(folder / self.identity.name, self.identity, self.values)


class Lookup:
    """A reference for `PairLoss`: sums that were computed before, by the rows' numbers."""

    def __init__(self, values: Tensor, ends: Tensor, *, num_documents: int) -> None:
        """Args:
        values: [documents of all rows] float64, on the device of the batches.
        ends: [rows] int64, how many documents the rows up to each one have.
        num_documents: of the row that has most.
        """
        self._values, self._places = values, torch.arange(num_documents, device=values.device)
        self._ends, self._begins = ends, torch.cat([ends.new_zeros(1), ends[:-1]])

    def __call__(self, batch: Batch) -> Tensor:
        rows = batch["indices"].clamp(min=0)  # a row that fills up a batch has none
        places = self._begins[rows][:, None] + self._places
        own = places < self._ends[rows][:, None]
        return self._values[places.where(own, 0)].where(own, 0.0)


def kept_reference(
    rows: PaddedRows,
    model: Model,
    identity: ReferenceIdentity,
    *,
    cache: Path,
    run: Path | None,
    micro_batch: int,
    say: Callable[[str], None],
) -> Kept:
    """The reference of one source's rows: a run's own, or that of other runs, or computed now; every rank calls it.

    Args:
        model: as the run began, whatever it becomes later.
        cache: folder of the references that runs share, on each machine.
        run: folder of the run that is resumed, or None.
        micro_batch: rows of a dp rank in one forward.
        say: prints a line.

    Raises:
        CheckpointError: a file has changed, or is that of other weights; on every rank.
    """
    mesh, shared = model.mesh, cache / identity.shared_name
    stored: list[Float64] = []

    def look() -> bool:
        for path in ([run / identity.name] if run is not None else []) + [shared]:
            if path.exists():
                stored.append(_read(path, identity, int(rows.document_ends[-1])))
                break
        return bool(stored)

    if mesh.share("reference", look):
        values = (
            torch.from_numpy(stored[0])
            if stored
            else torch.zeros(int(rows.document_ends[-1]), dtype=torch.float64)
        )
        values = values.to(mesh.device)
        if (world := mesh.group("world")) is not None:
            dist.broadcast(values, src=0, group=world)
        return Kept(identity, values.numpy(force=True))
    say(f"reference: computed once, of {rows.num_rows:,} rows")
    kept = Kept(identity, _computed(rows, model, micro_batch, say))

    def keep_shared() -> str:
        try:
            _write(shared, identity, kept.values)
        except OSError as error:  # a run also keeps its own
            return f"reference: not kept in {shared.parent}: {error.strerror}"
        return ""

    if problem := mesh.share("keep reference", keep_shared):
        say(problem)
    return kept


def digest_of(model: Model) -> str:
    """The checksum of all weights and kept buffers, the same on every mesh; every rank calls it."""
    hasher, mesh = xxhash.xxh3_128(), model.mesh
    for name, tensor in sorted(model.state_dict().items()):
        local: Any = tensor.detach()
        whole = local.to(mesh.device).full_tensor() if isinstance(local, DTensor) else local
        if mesh.rank == 0:
            hasher.update(f"{name} {tuple(whole.shape)} {whole.dtype} ".encode())
            hasher.update(whole.cpu().contiguous().flatten().view(torch.uint8).numpy())
    digest: str = mesh.share("weights", lambda: f"xxh3:{hasher.hexdigest()}")
    return digest


@torch.no_grad()
def _computed(
    rows: PaddedRows, model: Model, micro_batch: int, say: Callable[[str], None]
) -> Float64:
    """The sums of all documents, each computed by one dp rank, once; the same on every rank."""
    mesh, ends = model.mesh, rows.document_ends
    begins = np.concatenate([[0], ends[:-1]])
    most = most_documents([rows])
    # sums and how often each was computed: (2, documents)
    totals = torch.zeros(2, int(ends[-1]), dtype=torch.float64)
    token_loss = token_loss_of(model)
    dealt: Any = {
        "rows_per_rank": micro_batch,
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
    }
    reported_at = time.monotonic()
    with model.evaluating():
        for number, batch in enumerate(evaluation_batches(rows, **dealt, document_mask=True)):
            with model.computing(batch) as local:
                outputs = model.outputs(local, "log_probabilities", token_loss=token_loss)
                own = of_documents(model, outputs.values, local, most)
            for row, sums in zip(batch["indices"].tolist(), own.sums.cpu(), strict=True):
                if row >= 0:
                    totals[0, begins[row] : ends[row]] += sums[: ends[row] - begins[row]]
                    totals[1, begins[row] : ends[row]] += 1
            if time.monotonic() - reported_at > _TELL_EVERY_S:
                done = (number + 1) * micro_batch * mesh.dp_size
                reported_at = time.monotonic()
                say(f"reference: {min(done, rows.num_rows):,} of {rows.num_rows:,} rows")
    reshard(model.forward)
    totals = totals.to(mesh.device)
    mesh.all_reduce("dp", totals)
    values, times = totals.numpy(force=True)
    if not (times == 1).all() or not np.isfinite(values).all():
        wrong = int(np.flatnonzero((times != 1) | ~np.isfinite(values))[0])
        raise RunError(
            f"the reference's log-probability of document {wrong} is {values[wrong]}, computed {times[wrong]:g} times",
            expected="a finite value, computed once: nothing can be compared with this one",
            fix="try another dtype, --model.dtype float32, and look at the model's weights",
        )
    return np.ascontiguousarray(values)


def most_documents(parts: Sequence[PaddedRows]) -> int:
    """The number of documents of the row that has most."""
    return max(int(np.diff(part.document_ends, prepend=0).max()) for part in parts)


def _write(path: Path, identity: ReferenceIdentity, values: Float64) -> None:
    content = values.astype("<f8").tobytes()
    head = {"kind": _KIND, **vars(identity), "documents": len(values)}
    head["checksum"] = checksum_of(json.dumps(head).encode() + content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [json.dumps(head).encode(), b"\n", content])


def _read(path: Path, identity: ReferenceIdentity, num_documents: int) -> Float64:
    """Raises CheckpointError: the file is not as it was written, or that of something else."""
    again = f"rm {shell_word(path)}   (it is computed again from the weights that the run began with)"
    try:
        line, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            expected="the reference of a run",
            fix=f"chmod u+r {path}",
        ) from error
    try:
        head = json.loads(line)
        checksum = head.pop("checksum")
        whole = head["kind"] == _KIND and checksum == checksum_of(
            json.dumps(head).encode() + content
        )
        whole = whole and head["documents"] * 8 == len(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{path} has changed", expected="the reference as it was written", fix=again
        )
    for name, value in vars(identity).items():
        if head.get(name) != value:
            raise CheckpointError(
                f"{path} is the reference of other {name}: {head.get(name)}, not {value}",
                expected="what the run began with: against another reference its rewards mean something else",
                fix=f"the {name} that the run began with, or --log.dir ANOTHER_FOLDER for a new run",
            )
    if head["documents"] != num_documents:
        raise CheckpointError(
            f"{path} has {head['documents']:,} documents, not {num_documents:,}",
            expected="all of them",
            fix=again,
        )
    return np.frombuffer(content, dtype="<f8").astype(np.float64)
