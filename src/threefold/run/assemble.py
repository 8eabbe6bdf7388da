"""From a request and a live mesh to a run that can start: data, model, optimizer, checkpoints, trackers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from threefold.audit import row_lengths
from threefold.audit.digest import TOKEN_FIELDS
from threefold.audit.record import SegmentLine
from threefold.checkpoint.manifest import versions
from threefold.config.schema import DEFAULT_STEPS, Config
from threefold.data.chat.labeller import template_source
from threefold.data.order.length_buckets import LengthsOf
from threefold.data.order.mixture import Mixture
from threefold.data.order.order import Order, Place, last_step
from threefold.data.order.permutation import seed_of
from threefold.data.rows.best_fit import PaddedRows
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import blocks_of, parts_of
from threefold.data.rows.packing import MixedRows, Packing, open_rows, reopen_rows, store_at
from threefold.data.sampling.loader import Batch, TokenLoader, evaluation_batches
from threefold.data.store.overlap import Overlap, overlap
from threefold.data.tokens import Tokenizer
from threefold.mesh.environment import cache_folder
from threefold.mesh.mesh import Mesh
from threefold.model import noise
from threefold.model.build import build
from threefold.model.compiled import Recompiled
from threefold.model.data_parallel import device_of
from threefold.model.model import Model
from threefold.optim.build import build_optimizer, own_optimizer
from threefold.optim.ema import Ema
from threefold.plan import choices
from threefold.progress_bars import Bars
from threefold.run.checkpointer import Checkpointer, rate_of
from threefold.run.dpo import Pairs, pairs_of
from threefold.run.folder import RunFolder
from threefold.run.request import Asked
from threefold.run.same_bytes import of_one_copy, record_of, refuse_other_bytes
from threefold.run.sources import opened, sources_of
from threefold.run.user_objects import UserObjects

# Tokens of the training in which a start looks for the evaluation: some seconds.
_MOST_COMPARED = 1 << 27


@dataclass(frozen=True)
class Built(Asked):
    """Everything that a rank trains with, in the state in which training begins.

    Attributes:
        held_out: rows of the evaluation, or None.
        overlaps: on rank 0, what of each source of the evaluation is trained on, as far as it was looked for.
        num_steps: the last step's number.
        rate_why: the reason for the config's learning rate.
        user_objects: objects of the program that trains.
        pairs: the losses of a run on pairs of answers, else None.
        recompiled: counts how often layers are compiled again; None if they are not compiled.
    """

    mesh: Mesh
    folder: RunFolder
    rows: Rows
    held_out: Rows | None
    overlaps: Sequence[Overlap]
    loader: TokenLoader
    model: Model
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    checkpointer: Checkpointer
    num_steps: int
    rate_why: str
    user_objects: UserObjects
    pairs: Pairs | None
    recompiled: Recompiled | None

    @property
    def done(self) -> int:
        """The last step done before (0: none)."""
        return self.folder.done

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the complete model, however it is split."""
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    @property
    def micro_batch(self) -> int:
        """Rows of this dp rank in one forward."""
        return choices.micro_batch(self.config, self.mesh.topology).value


def build_run(
    asked: Asked,
    mesh: Mesh,
    folder: RunFolder,
    user_objects: UserObjects,
    *,
    say: Callable[[str], None],
    enter: Callable[[str], None],
) -> Built:
    """Opens the data, builds model and optimizer, and resumes if the folder has a checkpoint; all ranks call it.

    Args:
        say, enter: print a line on what takes long, and take what begins.

    Raises:
        DataError: the data cannot be read, or is not what the run began with.
        CheckpointError: the checkpoint belongs to another model or seed.
    """
    tokenizer, architecture = asked.tokenizer, asked.architecture
    rate, rate_why = rate_of(asked.config, folder)
    config = asked.config.with_rate(rate)
    vocab_size = getattr(architecture.get_text_config(), "vocab_size", None)
    rows = rows_of(config, tokenizer, mesh, vocab_size=vocab_size)
    held_out = (
        rows_of(config, tokenizer, mesh, vocab_size=vocab_size, held_out=True)
        if config.evaluates
        else None
    )
    refuse_other_bytes(rows, folder, mesh)
    overlaps: list[Overlap] = []
    if held_out is not None:
        mesh.share(
            "overlap", lambda: overlaps.extend(overlaps_of(rows, held_out, most=_MOST_COMPARED))
        )
    loader = loader_of(config, rows, mesh)
    enter("loading")
    model = build(config, asked.architecture, mesh)
    pairs = pairs_of(config, model, rows, held_out, resumed=folder.resumed_run, say=say)
    if user_objects.optimizer is not None:
        optimizer = own_optimizer(user_objects.optimizer, model)
        rate = optimizer.param_groups[0]["lr"]
        rate_why = "that of the optimizer as it was made"
        config = config.with_rate(rate)
    else:
        optimizer = optimizer_of(config, model)
    ema = average_of(config, model)
    torch.manual_seed(
        seed_of("a run", config.train.seed, *noise.places(mesh, model.tensor.sequence_group))
    )
    template = mesh.share("chat template", lambda: template_in_use(config, rows, tokenizer))
    checkpointer = Checkpointer(
        config,
        folder,
        mesh,
        model,
        optimizer,
        loader,
        architecture,
        template,
        user_objects.described,
        ema,
        getattr(held_out, "fingerprint", None),
    )
    enter("resuming")
    checkpointer.resume()
    return Built(
        **vars(dataclasses.replace(asked, config=config)),
        mesh=mesh,
        folder=folder,
        rows=rows,
        held_out=held_out,
        overlaps=overlaps,
        loader=loader,
        model=model,
        optimizer=optimizer,
        ema=ema,
        checkpointer=checkpointer,
        num_steps=num_steps_of(config, folder, loader),
        rate_why=rate_why,
        user_objects=user_objects,
        pairs=pairs,
        recompiled=Recompiled(say) if choices.compiled(config, device_of(mesh)).value else None,
    )


def overlaps_of(
    rows: Rows,
    held_out: Rows,
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Overlap]:
    """The part of each evaluation source that is trained on; arguments as for `overlap`."""
    training = {part.name: part.rows.store for part in parts_of(rows)}
    return [
        overlap(training, part.rows.store, most=most, progress=progress)
        for part in parts_of(held_out)
    ]


def optimizer_of(config: Config, model: Model) -> torch.optim.Optimizer:
    """The optimizer that a run asks for."""
    return build_optimizer(
        model.module,
        config.optimizer,
        model.mesh,
        dtype=getattr(torch, config.model.dtype),
        exact=config.train.exact,
        working=model.working,
    )


def average_of(config: Config, model: Model) -> Ema | None:
    """The average of the weights that a run asks for, or None."""
    if (decay := config.optimizer.ema) is None:
        return None
    return Ema(model.module, decay, exact=config.train.exact)


def tracked_facts(run: Built) -> dict[str, Any]:
    """Facts for trackers besides the config."""
    mesh = run.mesh
    sizes = {"mesh": str(mesh.topology), "ranks": mesh.world_size, "device": mesh.device.type}
    return {**sizes, "parameters": run.num_parameters, **versions()}


def rows_of(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    vocab_size: int | None = None,
    held_out: bool = False,
) -> Rows:
    """Returns the rows of data.source or data.mixture, or the held-out ones: of eval.source, or of these.

    One rank per machine prepares text, looks at files and compares their bytes; the others open what it prepared. Then
    all ranks compare the digests of their bytes: a DataError names the ranks, the block and the rows that differ.

    Args:
        vocab_size: of the model that reads them; None: the ids are not checked.
    """
    data, packing, cache = config.data, Packing.of(config.data), cache_folder()
    elsewhere = held_out and config.eval.source is not None
    sources = sources_of(config, held_out=elsewhere)
    packing = (
        dataclasses.replace(packing, eval_share=0.0)
        if elsewhere
        else dataclasses.replace(packing, held_out=held_out)
    )
    open_packed = functools.partial(
        open_rows, packing=packing, tokenizer=tokenizer, cache=cache, vocab_size=vocab_size
    )

    def open_here() -> list[tuple[str, str | None]]:
        return [
            store_at(opened(key, functools.partial(open_packed, source)))
            for key, source in sources.items()
        ]

    def open_on_every_host() -> Rows:
        stores = mesh.once_per_host("evaluation data" if held_out else "data", open_here)
        parts = [
            reopen_rows(prefix, blocks_at, packing, cache=cache) for prefix, blocks_at in stores
        ]
        if elsewhere or data.mixture is None:
            return parts[0]
        return MixedRows(dict(zip(data.mixture, parts, strict=True)))

    return of_one_copy(open_on_every_host, list(sources), mesh)


def template_in_use(config: Config, rows: Rows, tokenizer: Tokenizer) -> str | None:
    """The text of the chat template that rows with labels are rendered with; None if all are texts."""
    if not any(part.rows.store.has_loss_mask for part in parts_of(rows)):
        return None
    return template_source(tokenizer, next(iter(sources_of(config).values())).labels)


def num_steps_of(config: Config, folder: RunFolder, loader: TokenLoader) -> int:
    """The last step's number; with train.epochs from the rows that are left after the steps done."""
    if config.train.epochs is None:
        return config.train.steps or DEFAULT_STEPS
    done = folder.done
    ahead = [each for each in config.data.skip if each not in loader.left_out]
    return last_step(loader.order, loader.cursor().place, done=done, skip=ahead)


def order_of(config: Config, rows: Rows) -> Order:
    """The order in which training reads the rows, on any mesh."""
    mixture = None
    if config.data.mixture is not None:
        assert isinstance(rows, MixedRows)
        weights = {name: source.weight for name, source in config.data.mixture.items()}
        mixture = Mixture(rows.sizes, weights, seed=config.data.seed)
    return Order(
        num_rows=rows.num_rows,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        tail=config.data.tail if mixture is None else "drop",
        mixture=mixture,
        epochs=config.train.epochs,
        lengths=lengths_of(rows) if config.data.group_by_length else None,
    )


def lengths_of(rows: Rows) -> LengthsOf:
    """The lengths of rows that hold one document each."""
    assert isinstance(rows, PaddedRows)
    return rows.lengths


def loader_of(config: Config, rows: Rows, mesh: Mesh) -> TokenLoader:
    """The training batches of this rank."""
    order, parts = order_of(config, rows), parts_of(rows)
    loader = TokenLoader(
        rows,
        order,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        document_mask=bool(config.data.document_mask),
        num_workers=config.data.num_workers,
        pin_memory=mesh.on_cuda,
    )
    if files := {
        number: stored
        for number, part in enumerate(parts)
        if (stored := part.rows.store.stored) is not None
    }:
        from threefold.places.prefetch import Ahead  # a run on local disks loads nothing of it

        def rows_read(place: Place) -> tuple[list[int], list[int]]:
            here, _ = order.rows_of_rank(place, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
            return here.tolist(), order.rows(place, 1)[0].tolist()

        loader.ahead = Ahead(files, rows_read, functools.partial(blocks_of, parts))
    return loader


def start_of(run: Built) -> SegmentLine:
    """Where the coming steps begin, for the run's audit; every rank calls it."""
    config, mesh, loader = run.config, run.mesh, run.loader
    order = order_of(config, loader.rows)
    start = SegmentLine.of(
        order,
        loader.cursor().place,
        first_step=run.done + 1,
        topology=mesh.topology,
        every=config.audit.every,
        data=loader.rows.fingerprint,
        checkpoint=run.folder.resumed_from,
    )
    tensors = TOKEN_FIELDS if config.data.document_mask else TOKEN_FIELDS[:-1]
    start = dataclasses.replace(start, tensors=tensors, stores=record_of(loader.rows))
    if (lengths := order.lengths) is not None:
        grouped = mesh.share(
            "lengths", lambda: row_lengths.keep(run.folder.path, lengths, order.num_rows)
        )
        start = dataclasses.replace(start, grouped=grouped, lengths=lengths)
    return start


def held_out_batches(
    config: Config, rows: Rows, mesh: Mesh, bars: Bars
) -> Callable[[], Iterable[Batch]]:
    """Makes this rank's batches of held-out rows, each time anew, with a bar of how many are evaluated."""
    micro_batch = choices.micro_batch(config, mesh.topology).value
    make = functools.partial(
        evaluation_batches,
        rows,
        rows_per_rank=micro_batch,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        document_mask=bool(config.data.document_mask),
        alike=config.train.exact,
    )
    total = -(-rows.num_rows // (micro_batch * mesh.dp_size))
    return lambda: bars.track(make(), "evaluation", total)
