"""The screen of rank 0: first what will be trained, then each logged step and a live bar, finally the result."""

import dataclasses
from collections.abc import Iterator, Sequence

from threefold.config.schema import DEFAULT_STEPS, EMBEDDED_DEFAULT, value_at
from threefold.config.yaml_text import as_yaml
from threefold.data.order.order import last_step
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import SourceRows, parts_of, reasons_text, why_cut
from threefold.data.text.source import no_end_warning
from threefold.data.tokens import spelled_out
from threefold.errors import EXIT_FAILED, EXIT_STOPPED_WITH_CHECKPOINT, shell_word
from threefold.jsonl import Values
from threefold.mesh import environment
from threefold.model.layer_kinds import common_number
from threefold.optim import build as optimizers
from threefold.optim.schedule import learning_rate
from threefold.run.assemble import Built
from threefold.run.dpo import FOLDER as REFERENCE
from threefold.run.head import Entry, Head
from threefold.run.terminal import Screen
from threefold.run.user_objects import name_of
from threefold.training.loop import Outcome

_NAMED = 3
_LOOKED_AT = 1 << 14


def head_of(run: Built, why: str, findings: Sequence[tuple[str, str]]) -> Head:
    """The head of a run; `why` is the reason for its mesh, `findings` what probes and estimates say of it."""
    config, mesh = run.config, run.mesh
    ahead = run.done < run.num_steps
    info = environment.current()
    stored = run.loader.ahead
    who_can_join = "only ranks with the token can join"
    if environment.token() is None:
        who_can_join = "no THREEFOLD_TOKEN, so every host that reaches them must be trusted"
    return Head(
        path=str(run.folder.path),
        model=_model(run),
        mesh=mesh.topology.sizes,
        device=mesh.device.type,
        mesh_why=why,
        data=_data(run),
        global_batch=config.train.global_batch,
        stored=stored.facts(run.loader.begins()) if ahead and stored is not None else None,
        labels=labels_of(run.rows),
        notes=[*_notes(run)],
        first_step=run.done + 1 if ahead else None,
        last_step=run.num_steps if ahead else None,
        epochs=epochs_ahead(run) if ahead else None,
        rate=(config.optimizer.lr, run.rate_why),
        hosts=(mesh.num_hosts, who_can_join) if mesh.num_hosts > 1 else (),
        choices=[*_choices(run, findings)],
        resumed=str(run.folder.resume.path) if run.folder.resume is not None else None,
        lost_bits=run.checkpointer.lost_bits,
        changed=[
            *(("changed", str(change)) for change in run.checkpointer.changed),
            *_schedule_changed(run),
        ]
        if run.folder.resume is not None
        else (),
        restart=(info.restart, info.max_restarts, info.launcher) if info.restart else (),
    )


def introduce(console: Screen, head: Head) -> None:
    """Prints the head of a run."""
    console.tell("head", head.to_values(), "\n".join(head.lines()))


def _model(run: Built) -> Values:
    config = run.config
    text = run.architecture.get_text_config()
    random = config.model.name_or_path is None
    heads = common_number(text, "num_attention_heads")
    sizes = {
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "heads": heads,
        "kv_heads": common_number(text, "num_key_value_heads") or heads,
        "vocabulary": getattr(text, "vocab_size", None),
    }
    return {
        "name": config.model.name_or_path or f"random weights from seed {config.train.seed}",
        "type": (config.model.config or EMBEDDED_DEFAULT)["model_type"] if random else None,
        "dtype": config.model.dtype,
        "parameters": run.num_parameters,
        **{name: size for name, size in sizes.items() if isinstance(size, int)},
    }


def _data(run: Built) -> Values:
    data = run.config.data
    source = data.source if isinstance(data.source, str) else as_yaml(data.source)
    if data.mixture is not None:
        source = " + ".join(f"{part.weight:g} {name}" for name, part in data.mixture.items())
    return {
        "source": source,
        "tokenizer": run.tokenizer.name,
        "rows": str(run.rows.report),
        "seq_len": data.seq_len,
    }


def labels_of(rows: Rows) -> list[Entry]:
    """(source, its format and how many tokens are trained on, also packed) of each source with a loss mask."""
    parts, entries = parts_of(rows), []
    for part in parts:
        info = part.rows.store.info
        if info is not None and info.loss_mask is not None:
            targets = part.rows.num_targets
            empty = int((targets == 0).sum())
            packed = f"after packing: {int(targets.sum()):,}" + (
                f", none in {empty:,} of its rows" if empty else ""
            )
            if (
                int(targets.sum()) < (info.num_loss_tokens or 0)
                and part.rows.store.has_loss_mask
            ):
                why = {reason: int(each.sum()) for reason, each in why_cut(part.rows).items()}
                packed += f"; cut off: {reasons_text(why)}"
            entries.append(
                (part.name if len(parts) > 1 else "", f"{info.mask_summary}; {packed}")
            )
    return entries


def _same_rows(parts: Sequence[SourceRows]) -> Iterator[Entry]:
    """Sources of a mixture that are one, by its rows."""
    same: dict[str, list[str]] = {}
    for part in parts:
        same.setdefault(part.rows.fingerprint, []).append(part.name)
    for names in same.values():
        if len(names) > 1:
            yield "", f"warning: {' and '.join(names)} are the same rows, read once for each"


def _notes(run: Built) -> Iterator[Entry]:
    """Further facts about data and loss."""
    parts = parts_of(run.rows)
    for part in parts:
        source, store = f"{part.name}: " if len(parts) > 1 else "", part.rows.store
        if (info := store.info) is not None and info.bos_id is not None:
            yield "bos", f"{source}token {info.bos_id} begins each document: data.bos"
        # At an address, this rank alone would wait for it.
        if store.stored is None and not (store.loss_mask and store.loss_mask.templated):
            begin = store.read(0, min(store.num_tokens, _LOOKED_AT))
            if spelled := spelled_out(run.tokenizer, begin):
                yield "", f"warning: {source}{spelled}"
    yield from _same_rows(parts)
    masks = [part.rows.store.loss_mask for part in parts]
    if any(mask is not None and mask.end == "missing" for mask in masks):
        yield "", no_end_warning(run.config.data.chat_template or run.tokenizer.name)
    # Held-out rows that are also trained on: on those the evaluation measures memorisation.
    for overlap in run.overlaps:
        for line in overlap.lines(_NAMED):
            yield ("", f"warning: {line}") if overlap.exact or overlap.alike else ("eval", line)
    if run.loader.order.mixture is not None:
        yield "shares", run.loader.order.mixture.shares
    if run.pairs is not None:
        dpo, how = run.config.dpo, "without the adapters"
        if not run.config.model.lora.r:
            how = f"as kept in {run.folder.path / REFERENCE}"
        yield "dpo", f"{dpo.loss}, beta {dpo.beta:g}; reference: the initial model, {how}"


def _choices(run: Built, findings: Sequence[Entry]) -> Iterator[Entry]:
    """What was given or chosen, with `findings`, and why."""
    if run.config.data.allow_other_tokenizer:
        why = "not compared with the model's own: data.allow_other_tokenizer"
        yield "tokenizer", f"{run.tokenizer.name}, {why}"
    yield from findings
    yield from run.model.choices
    yield from optimizers.described(run.optimizer, run.config.optimizer)
    if run.user_objects.loss is not None:
        yield (
            "loss",
            f"{name_of(run.user_objects.loss)}, of {run.user_objects.loss_on}: as given",
        )
    if run.config.data.skip:
        skips = ", ".join(f"[{first}, {last}]" for first, last in run.config.data.skip)
        yield "data.skip", f"the batches of steps {skips} are left out"


def epochs_ahead(run: Built) -> str | None:
    """What the steps of a run that counts epochs, or drops an epoch's end, do with rows that fill no batch."""
    order = run.loader.order
    place = run.loader.cursor().place
    if order.mixture is not None or (order.epochs is None and order.tail == "carry"):
        return None
    rest = order.num_rows % order.global_batch
    if order.tail == "drop":
        what = (
            f"{rest:,} of them in none: they fill no batch (data.tail: drop)"
            if rest
            else "each of them once"
        )
        return f"{order.epochs or ''} of {order.num_rows:,} rows, {what}".lstrip()
    last = order.after(place, order.steps_left(place) - 1)
    short = (
        f"; the last step has {read:,}"
        if (read := order.num_read(last)) < order.global_batch
        else ""
    )
    return f"{order.epochs} of {order.num_rows:,} rows, each of them once{short}"


def epochs_read(run: Built) -> str:
    """The rows and epochs read by a finished run."""
    loader, order = run.loader, run.loader.order
    read = f"read: {loader.rows_read:,} rows"
    if order.mixture is not None:
        return read
    read += f", {loader.rows_read / order.num_rows:.2f} epochs of {order.num_rows:,}"
    if order.tail == "drop" and (rest := order.num_rows % order.global_batch):
        return f"{read}; {rest:,} rows of each epoch fill no batch and were left out (data.tail: drop)"
    if order.epochs is None or order.steps_left(loader.place):
        return f"{read}; {order.num_rows - loader.place.position:,} rows of epoch {loader.epoch} are left"
    return f"{read}; none is left" + (
        ", except what data.skip left out" if loader.left_out else ""
    )


def _schedule_changed(run: Built) -> list[Entry]:
    """The effect of another number of steps on the learning rate of a resumed run."""
    before = _steps_before(run)
    optimizer = run.config.optimizer
    endless = optimizer.schedule in ("constant", "inverse_sqrt")
    if before == run.num_steps or endless or run.done >= run.num_steps:
        return []
    last = learning_rate(run.done, num_steps=before, config=optimizer)
    now = learning_rate(run.done + 1, num_steps=run.num_steps, config=optimizer)
    shape = f"{optimizer.schedule} over {run.num_steps:,} steps, not {before:,}"
    return [
        ("schedule", f"{shape}: the rate of step {run.done + 1} is {now:.2e}, after {last:.2e}")
    ]


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
    if saved != outcome.step:
        newest = run.folder.checkpoints.newest()
        kept = (
            f"the newest checkpoint is of step {newest.step}"
            if newest is not None
            else "there is no checkpoint"
        )
        console.print(f"not saved: the state after step {outcome.step}; {kept}, in {path}")
        console.print(f"repeat the steps since then: threefold resume {shell_word(path)}")
        return EXIT_FAILED
    if by_signal:
        left = "" if outcome.evaluated else ", in its evaluation, which the next start makes"
        console.print(
            f"stopped by a signal after step {outcome.step}{left}; the checkpoint is saved in {path}"
        )
        console.print(f"resume: threefold resume {shell_word(path)}")
        return EXIT_STOPPED_WITH_CHECKPOINT
    if run.mesh.rank != 0:
        return 0
    if run.config.log.sample_tokens and not console.quiet:
        from threefold.run.eval_samples import show_sample

        show_sample(console, run)
    loss = f"loss {outcome.loss:.4f}, " if outcome.loss is not None else ""
    console.print(epochs_read(run))
    if (stored := run.loader.ahead) is not None:
        console.print(str(stored.counts))
    done = "stopped by a hook" if outcome.stopped else "done"
    console.print(f"{done}: {outcome.step} steps, {loss}in {path}")
    console.print(f"export: threefold export {shell_word(path)} --to DIR")
    return 0
