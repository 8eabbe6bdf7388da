"""The audit of a run that starts: where it must begin by the run's own record, and the line that says it started.

The place where a run goes on is known twice: the loader has it from the checkpoint, audit.jsonl from what was read.
They are compared before the first step, so a resume that is a batch off trains on nothing.
"""

from __future__ import annotations

from typing import Any

from threefold.audit import record as audit_record
from threefold.audit.compare import AuditPlan, RunAudit
from threefold.audit.record import SegmentLine, described
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.data.order import Order, Place
from threefold.errors import RunError, rows_text
from threefold.jsonl import MetricsFile
from threefold.mesh.mesh import Mesh
from threefold.run import assemble
from threefold.run.folder import RunFolder


def open_audit(config: Config, folder: RunFolder, mesh: Mesh, loader: TokenLoader, *, done: int) -> RunAudit:
    """The audit of the steps after `done`, which adds to the run's audit.jsonl; every rank calls it.

    Raises:
        RunError: the loader does not go on where the record of the run ended; on every rank.
    """
    order = Order(
        num_rows=loader.rows.num_rows,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        mixture=assemble.mixture_of(config, loader.rows),
    )
    go_on = f"threefold train {folder.path}/config.yaml --log.dir {folder.path}"

    path = folder.path / audit_record.FILE
    record = MetricsFile(path) if mesh.rank == 0 else None

    def start() -> dict[str, Any]:
        assert record is not None
        before = audit_record.read(path) if path.stat().st_size else []
        begin = order.begin(loader.cursor().place)
        known = audit_record.place_after(before, done) if done else Place(0, 0)
        if known is not None and order.begin(known) != begin:
            raise _one_off(order, begin, order.begin(known), first_step=done + 1, go_on=go_on)
        segment = before[-1].start.segment + 1 if before else 1
        record.log(_segment_line(config, folder, mesh, loader, order, begin, done + 1, segment).to_record())
        return {"segment": segment, "begin": begin}

    started = mesh.share("audit", start)
    plan = AuditPlan(
        order,
        every=config.audit.every,
        first_step=done + 1,
        begin=Place(*started["begin"]),
        skips=loader.planned,
        segment=started["segment"],
        go_on=go_on,
    )
    return RunAudit(mesh, loader.rows, plan, record=record)


def _segment_line(
    config: Config,
    folder: RunFolder,
    mesh: Mesh,
    loader: TokenLoader,
    order: Order,
    begin: Place,
    first_step: int,
    segment: int,
) -> SegmentLine:
    return SegmentLine(
        segment=segment,
        first_step=first_step,
        epoch=begin.epoch,
        position=begin.position,
        mesh=mesh.topology.sizes,
        global_batch=order.global_batch,
        num_rows=order.num_rows,
        seed=order.seed,
        shuffle=order.shuffle,
        tail=order.tail,
        order_version=order.version,
        data=loader.rows.fingerprint,
        mixture=described(order.mixture) if order.mixture is not None else None,
        every=config.audit.every,
        checkpoint=str(folder.resume.path) if folder.resume is not None else None,
    )


def _one_off(order: Order, begin: Place, known: Place, *, first_step: int, go_on: str) -> RunError:
    if begin > known:
        lost = f"{rows_text(order.rows(known, 1)[0])} would be left out"
    else:
        lost = f"{rows_text(order.rows(begin, 1)[0])} would be read again"
    return RunError(
        f"step {first_step} would begin at position {begin.position} of epoch {begin.epoch}, but by audit.jsonl step "
        f"{first_step - 1} ended at position {known.position} of epoch {known.epoch}: {lost}",
        expected="the checkpoint and the record of the run to agree on what was read",
        fix=f"go on from an older checkpoint: {go_on} --checkpoint.resume RUN/checkpoints/step-...",
    )
