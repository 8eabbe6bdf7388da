"""The screen of rank 0: first what will be trained, then each logged step and a live bar, at last the result."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Sequence

import numpy as np
from transformers import PretrainedConfig

from threefold import __version__
from threefold.checkpoint.layout import CheckpointFolder
from threefold.config.schema import EMBEDDED_DEFAULT, value_at
from threefold.config.text import as_yaml
from threefold.data.order import last_step
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import parts_of
from threefold.data.text.source import NO_END, no_end_warning
from threefold.errors import EXIT_FAILED, EXIT_STOPPED_WITH_CHECKPOINT
from threefold.export.generation import generate_sample
from threefold.mesh import environment
from threefold.model.layer_kinds import common_number
from threefold.run.assemble import DEFAULT_STEPS, Built
from threefold.run.given import name_of
from threefold.run.pairs import FOLDER as REFERENCE
from threefold.run.terminal import SAMPLE, Screen
from threefold.training import optimizer as optimizers
from threefold.training.loop import Outcome
from threefold.training.schedule import learning_rate

log = logging.getLogger("threefold")

_FIRST_ROW = np.zeros(1, dtype=np.int64)
_LARGEST_SAMPLED = 500_000_000


def introduce(console: Screen, run: Built, why: str, found: Sequence[tuple[str, str]]) -> None:
    """Prints the head of a run; `why` is the reason for its mesh, `found` what probes and estimates say of it."""
    config, mesh = run.config, run.mesh
    name = config.model.name_or_path or f"random weights from seed {config.train.seed}"
    ranks = f"{mesh.world_size} ranks" if mesh.world_size > 1 else "1 process"
    sizes = config.model.config or EMBEDDED_DEFAULT
    origin = "" if config.model.name_or_path else f"{sizes['model_type']}, "
    seq_len, source = config.data.seq_len, config.data.source
    named = source if isinstance(source, str) else as_yaml(source)
    if config.data.mixture is not None:
        named = " + ".join(f"{each.weight:g} {name}" for name, each in config.data.mixture.items())
    lines = [
        f"threefold {__version__}  {run.folder.path}",
        f"  model  {origin}{run.num_parameters:,} parameters, {name}, {config.model.dtype}",
        f"         {shape_text(run.architecture)}",
        f"  mesh   {mesh.topology} on {ranks} ({mesh.device.type}): {why}",
        f"  data   {named} ({run.tokenizer.name}): {run.rows.report}; {seq_len} tokens a row",
    ]
    lines += learnt_of(run.rows)
    lines += [f"  {no_end_warning(config.data.chat_template or run.tokenizer.name)}"] if without_end(run.rows) else []
    if run.loader.order.mixture is not None:
        lines.append(f"  shares {run.loader.order.mixture.shares}")
    if run.pairs is not None:
        how = "without the adapters" if config.model.lora.r else f"as kept in {run.folder.path / REFERENCE}"
        lines.append(f"  dpo    {config.dpo.loss}, beta {config.dpo.beta:g}; reference: the model at its start, {how}")
    if run.done < run.num_steps:
        lines.append(f"  steps  {run.done + 1} to {run.num_steps}, {config.train.global_batch} rows each")
        lines += epochs_ahead(run)
        lines.append(f"  lr     {config.optimizer.lr:g}: {run.rate_why}")
    if mesh.num_hosts > 1:
        lines.append(f"  hosts  {mesh.num_hosts}: {_who_can_join()}")
    if config.data.allow_other_tokenizer:
        own = "which is not compared with the model's own"
        lines.append(f"  tokenizer: {run.tokenizer.name}, {own}: data.allow_other_tokenizer")
    chosen = (*found, *run.model.choices, *optimizers.said(run.optimizer, config.optimizer))
    lines += [f"  {choice}: {reason}" for choice, reason in chosen]
    lines += [f"  loss: {name_of(run.given.loss)}, of {run.given.loss_on}: as given"] if run.given.loss else []
    if config.data.skip:
        skips = ", ".join(f"[{first}, {last}]" for first, last in config.data.skip)
        lines.append(f"  data.skip: the batches of the steps {skips} are left out")
    if run.folder.resume is not None:
        lost = run.checkpointer.lost_bits
        bits = "" if lost is None else f", with other bits: {'; '.join(lost)}" if lost else ", bit for bit"
        lines.append(f"  resumed from {run.folder.resume.path}{bits}")
        lines += [f"  changed: {change}" for change in run.checkpointer.changed]
        lines += _schedule_changed(run)
    if (info := environment.current()).restart:
        by = f" of {info.max_restarts}: a rank had failed" if info.max_restarts else f": by {info.launcher}"
        lines.append(f"  restart {info.restart}{by}")
    console.print("\n".join(lines))


def learnt_of(rows: Rows) -> list[str]:
    """The format of each source with labels, and how many of its tokens are learnt."""
    parts = [(part.name, part.rows.store.info) for part in parts_of(rows)]
    named = "{}: " if len(parts) > 1 else ""
    lines = [f"  format {named.format(name)}{info.learnt}" for name, info in parts if info is not None and info.labels]
    begun = [(name, info.bos_id) for name, info in parts if info is not None and info.bos_id is not None]
    return lines + [f"  bos    {named.format(name)}token {id} begins each document: data.bos" for name, id in begun]


def without_end(rows: Rows) -> bool:
    """Whether answers of a source are learnt without anything that ends them, although their end is to be learnt."""
    return any(NO_END in (part.rows.store.labels or "") for part in parts_of(rows))


def epochs_ahead(run: Built) -> list[str]:
    """What the steps of a run that counts epochs, or drops an epoch's end, do with rows that fill no batch."""
    order, place = run.loader.order, run.loader.cursor().place
    if order.mixture is not None or (order.epochs is None and order.tail == "carry"):
        return []
    rest = order.num_rows % order.global_batch
    if order.tail == "drop":
        what = f"{rest:,} of them in none: they fill no batch (data.tail: drop)" if rest else "each of them once"
        return [f"  epochs {order.epochs or ''} of {order.num_rows:,} rows, {what}".replace("  of", " of")]
    last = order.after(place, order.steps_left(place) - 1)
    short = f"; the last step has {read:,}" if (read := order.num_read(last)) < order.global_batch else ""
    return [f"  epochs {order.epochs} of {order.num_rows:,} rows, each of them once{short}"]


def epochs_read(run: Built) -> str:
    """What a run that has ended has read, in rows and epochs."""
    loader, order = run.loader, run.loader.order
    read = f"read: {loader.rows_read:,} rows"
    if order.mixture is not None:
        return read
    read += f", {loader.rows_read / order.num_rows:.2f} epochs of {order.num_rows:,}"
    if order.tail == "drop" and (rest := order.num_rows % order.global_batch):
        return f"{read}; {rest:,} rows of each epoch fill no batch and were left out (data.tail: drop)"
    if order.epochs is None or order.steps_left(loader.place):
        return f"{read}; {order.num_rows - loader.place.position:,} rows of epoch {loader.epoch} are left"
    return f"{read}; none is left" + (", but for what data.skip left out" if loader.left_out else "")


def _who_can_join() -> str:
    if environment.token() is not None:
        return "only ranks with the token can join"
    return "no THREEFOLD_TOKEN, so every host that reaches them must be trusted"


def shape_text(architecture: PretrainedConfig) -> str:
    """Returns the sizes of a model that show at a glance whether it is the one that was meant."""
    text = architecture.get_text_config()
    sizes = {
        "layers": getattr(text, "num_hidden_layers", None),
        "wide": getattr(text, "hidden_size", None),
        "heads": (heads := common_number(text, "num_attention_heads")),
        "kv heads": common_number(text, "num_key_value_heads") or heads,
        "tokens in the vocabulary": getattr(text, "vocab_size", None),
    }
    return ", ".join(f"{size:,} {what}" for what, size in sizes.items() if isinstance(size, int))


def _schedule_changed(run: Built) -> list[str]:
    """What another number of steps does to the rate of a run that is resumed."""
    before, optimizer = _steps_before(run), run.config.optimizer
    endless = optimizer.schedule in ("constant", "inverse_sqrt")
    if before == run.num_steps or endless or run.done >= run.num_steps:
        return []
    last = learning_rate(run.done, num_steps=before, config=optimizer)
    now = learning_rate(run.done + 1, num_steps=run.num_steps, config=optimizer)
    shape = f"{optimizer.schedule} over {run.num_steps:,} steps, not {before:,}"
    return [f"  schedule: {shape}: the rate of step {run.done + 1} is {now:.2e}, after {last:.2e}"]


def _steps_before(run: Built) -> int:
    """The number of steps that a run had before it was resumed: another global batch has fewer or more of them."""
    changed = {change.key: change.before for change in run.checkpointer.changed}
    keys = ("train.steps", "train.epochs", "train.global_batch")
    steps, epochs, global_batch = (changed.get(key, value_at(run.config, key)) for key in keys)
    if steps or not epochs:
        return steps or DEFAULT_STEPS
    order = dataclasses.replace(run.loader.order, global_batch=global_batch, epochs=epochs)
    ahead = [each for each in run.config.data.skip if each not in run.loader.left_out]
    return last_step(order, run.loader.cursor().place, done=run.done, skip=ahead)


def conclude(console: Screen, run: Built, outcome: Outcome) -> int:
    """Prints how the run ended, with a sample of the model's text, and returns the exit code."""
    path, saved = run.folder.path, run.checkpointer.saver.saved_step
    by_signal = outcome.stopped and outcome.by == "signal"
    event = "stop" if outcome.stopped else "done"
    if run.mesh.rank == 0:
        run.folder.journal.note(event, step=outcome.step, saved=saved, start=run.checkpointer.folder.start)
    if saved != outcome.step:
        newest = run.folder.checkpoints.newest()
        kept = f"the newest checkpoint is of step {newest.step}" if newest is not None else "there is no checkpoint"
        console.print(f"not saved: the state after step {outcome.step}; {kept}, in {path}")
        console.print(f"train the steps since again: threefold resume {shlex.quote(str(path))}")
        return EXIT_FAILED
    if by_signal:
        console.print(f"stopped by a signal after step {outcome.step}; the checkpoint is saved in {path}")
        console.print(f"resume: threefold resume {shlex.quote(str(path))}")
        return EXIT_STOPPED_WITH_CHECKPOINT
    if run.mesh.rank != 0:
        return 0
    if run.config.log.sample_tokens and not console.quiet:
        _show_sample(console, run)
    loss = f"loss {outcome.loss:.4f}" if outcome.loss is not None else ""
    console.print(epochs_read(run))
    done = "stopped by a hook" if outcome.stopped else "done"
    console.print(f"{done}: {outcome.step} steps, {loss}, in {path}")
    console.print(f"export: threefold export {shlex.quote(str(path))} --to DIR")
    return 0


def _show_sample(console: Screen, run: Built) -> None:
    if run.num_parameters > _LARGEST_SAMPLED:
        console.print(f"no sample: {run.num_parameters:,} parameters are too many for one process after training")
        return
    checkpoint = CheckpointFolder(run.folder.path).newest()
    assert checkpoint is not None
    prompt = run.rows.rows(_FIRST_ROW)["input_ids"][0][: max(1, min(48, run.config.data.seq_len // 2))]
    text = generate_sample(checkpoint, run.tokenizer, prompt.tolist(), num_tokens=run.config.log.sample_tokens)
    console.print("a sample (the prompt, then what the model wrote):")
    console.print("\n".join(f"{SAMPLE}{line}" for line in text.splitlines()))
