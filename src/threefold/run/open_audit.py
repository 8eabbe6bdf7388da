"""Opens the audit of a run: checks where it must begin by the run's own record, and records the start.

The place where a run resumes is known twice: the loader has it from the checkpoint, and audit.jsonl from what was read.
They are compared before the first step, so a resume that is off by a batch never trains.
"""

from __future__ import annotations

import json

from threefold.audit import record as audit_record
from threefold.audit.compare import AuditPlan, RunAudit
from threefold.audit.digest import Place, Prediction
from threefold.audit.record import SegmentLine, described
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.data.permutation import ORDER_VERSION
from threefold.errors import RunError, rows_text
from threefold.jsonl import MetricsFile
from threefold.mesh.mesh import Mesh
from threefold.run import assemble
from threefold.run.folder import RunFolder


def open_audit(config: Config, folder: RunFolder, mesh: Mesh, loader: TokenLoader, *, done: int) -> RunAudit:
    """Returns the audit of the steps after `done`, which appends to the run's audit.jsonl; every rank calls it.

    Raises:
        RunError: the loader does not resume where the run's record ended; on every rank.
    """
    prediction = Prediction(
        num_rows=loader.rows.num_rows,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        order_version=ORDER_VERSION,
        mixture=assemble.mixture_of(config, loader.rows),
    )
    go_on = f"threefold train {folder.path}/config.yaml --log.dir {folder.path}"

    path = folder.path / audit_record.FILE
    record = MetricsFile(path) if mesh.rank == 0 else None

    def start() -> str:
        assert record is not None
        before = audit_record.read(path) if path.stat().st_size else []
        cursor = loader.cursor()
        begin = prediction.begin(Place(cursor.epoch, cursor.position))
        known = audit_record.place_after(before, done) if done else Place(0, 0)
        if known is not None and prediction.begin(known) != begin:
            raise _one_off(prediction, begin, prediction.begin(known), first_step=done + 1, go_on=go_on)
        segment = before[-1].start.segment + 1 if before else 1
        record.log(_segment_line(config, folder, mesh, loader, prediction, begin, done + 1, segment).to_record())
        return json.dumps({"segment": segment, "begin": begin})

    started = json.loads(mesh.share("audit", start))
    plan = AuditPlan(
        prediction,
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
    prediction: Prediction,
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
        global_batch=prediction.global_batch,
        num_rows=prediction.num_rows,
        seed=prediction.seed,
        shuffle=prediction.shuffle,
        tail=prediction.tail,
        order_version=prediction.order_version,
        data=loader.rows.fingerprint,
        mixture=described(prediction.mixture) if prediction.mixture is not None else None,
        every=config.audit.every,
        checkpoint=str(folder.resume.path) if folder.resume is not None else None,
    )


def _one_off(prediction: Prediction, begin: Place, known: Place, *, first_step: int, go_on: str) -> RunError:
    if begin > known:
        lost = f"{rows_text(prediction.rows(known, 1)[0])} would be left out"
    else:
        lost = f"{rows_text(prediction.rows(begin, 1)[0])} would be read again"
    return RunError(
        f"step {first_step} would begin at position {begin.position} of epoch {begin.epoch}, but by audit.jsonl step "
        f"{first_step - 1} ended at position {known.position} of epoch {known.epoch}: {lost}",
        expected="the checkpoint and the record of the run to agree on what was read",
        fix=f"go on from an older checkpoint: {go_on} --checkpoint.resume RUN/checkpoints/step-...",
    )
