"""What a run's record proves about the rows it has read, as lines: coverage, shares, bytes, and the final verdict.

The proof itself is `audit/proof`'s. What it needs besides the record is in the run's folder: its checkpoints, the last
step that it has logged, and its config.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from threefold.audit import record
from threefold.audit.lookup import coverage_lines
from threefold.audit.proof import SavedPlace, check_chain, check_logged, check_saved, prove
from threefold.audit.record import Line, Segment, SegmentLine
from threefold.audit.stores import ALL, SAMPLED, are_here, byte_lines
from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import Identity, Journal
from threefold.config import loading
from threefold.config.paths import RUN_FILE
from threefold.config.yaml_text import parse
from threefold.data.order.mixture import Mixture
from threefold.data.order.order import Place
from threefold.data.rows.concat import Rows, counted
from threefold.data.rows.packing import Packing
from threefold.errors import CheckpointError, ConfigError, RunError, ThreefoldError
from threefold.jsonl import Values
from threefold.mesh.environment import cache_folder
from threefold.records.run import RunRecord
from threefold.run import resume_choice

# For the folder of a loop that has saved there without a run.
_LOOP = {
    "audit": "its loop has no run",
    "audit_fix": "threefold.Run(folder), and for batch in run.steps(loader)",
}


def proof_lines(
    run: Path, rows_of: Callable[[Path, Sequence[Segment]], Rows] | None = None
) -> Iterator[str]:
    """The proof of what a run has read, as lines; RunError names the first wrong step.

    Args:
        rows_of: opens the run's source: then every token is read again and compared, and all blocks of its stores.
    """
    contents = rows_of is not None
    loop = _LOOP if (run / "checkpoints").is_dir() and not (run / RUN_FILE).exists() else None
    why = next(
        (start for start in reversed(Journal(run).starts()) if start.get("audit_fix")), loop
    )
    if why is not None and not (run / record.FILE).exists():
        raise ConfigError(
            f"{run} was not audited: {why['audit']}",
            expected="rows whose order is known, and steps of a run: nothing can be proved about others",
            fix=f"for the next run: {why['audit_fix']}",
        )
    # A run that continues writes its record first, so that is read last: it has all that was logged or saved before.
    past = RunRecord(run)
    logged = past.last_logged
    checkpoints = list(_checkpoints(run))
    lines = record.read_lines(run / record.FILE)
    segments = record.standing(lines)
    stretches = prove(segments, rows_of(run, segments) if rows_of is not None else None)
    chain = _check_lineage(run, lines, checkpoints)
    check_logged(segments, logged)
    if not any(stretch.first_step for stretch in stretches):
        raise RunError(
            f"{run} has no audited step yet",
            expected="at least one line of kind steps in audit.jsonl",
            fix="wait for the first audit (audit.every steps), or run it with audit.every > 0",
        )
    first, last = first_and_last_step(segments)
    yield f"{run}: steps {first:,} to {last:,}, {counted(len(segments), 'start')}"
    for segment in segments:
        end = segment.last_step or last
        if end >= segment.start.first_step:
            bits = _bits_of(past, segment.start.first_step)
            yield f"  steps {segment.start.first_step:,} to {end:,} on {segment.start.topology}{bits}"
    yield from chain
    yield from coverage_lines(stretches)
    yield from _shares(run, segments[-1].start)
    num_read = sum(stretch.stop - stretch.start for stretch in stretches if stretch.first_step)
    hashed = [segment for segment in segments if segment.start.stores]
    if not segments[-1].start.data:
        what = "samples (of a program's dataset, whose contents have no fingerprint)"
    elif contents:
        what = "samples and tokens"
    elif len(hashed) == len(segments):
        what = "samples and bytes (--contents also compares every token)"
    else:
        what = "samples"
        until = hashed[0].start.first_step - 1 if hashed else last
        yield f"  bytes of steps {first:,} to {until:,}: not known, the record has no hashes (--contents reads all)"
    yield from _byte_lines(run, hashed, contents=contents)
    yield f"proved: {num_read:,} reads, each by exactly one dp rank in exactly one step: {what}"


def _checkpoints(run: Path) -> Iterator[tuple[Checkpoint, Values]]:
    """The complete checkpoints with their manifests; a run that continues may prune one meanwhile."""
    for each in CheckpointFolder(run).complete():
        try:
            yield each, each.manifest()
        except CheckpointError:
            if each.path.exists():
                raise


def _check_lineage(
    run: Path, lines: Sequence[Line], checkpoints: Sequence[tuple[Checkpoint, Values]]
) -> list[str]:
    """Who wrote the record and the checkpoints, as lines; RunError for one that no start of the run wrote.

    A Trainer's record and a loop's checkpoints are of no run, and have no chain.
    """
    folder = CheckpointFolder(run)
    identity = Identity.read(run)
    saved = [
        SavedPlace(
            each.path, each.step, Place(at["epoch"], at["position"]), manifest.get("link")
        )
        for each, manifest in checkpoints
        if (at := manifest["data"])
    ]
    if identity is None:
        if any(isinstance(line, SegmentLine) and line.link is not None for line in lines):
            raise resume_choice.unnamed(run)
        check_saved(lines, saved)
        return []
    if foreign := folder.foreign():
        raise RunError(
            f"{resume_choice.writer(foreign[0], identity)} wrote {foreign[0].path}",
            expected="checkpoints of the starts in run.json: what the run has read says nothing about others",
            fix=f"move it out of {folder.path}",
        )
    check_chain(lines, [(start.link, start.step) for start in identity.starts])
    check_saved(lines, saved)
    by_step = {each.step: (each, manifest["start"]) for each, manifest in checkpoints}
    for number, start in enumerate(identity.starts, 1):
        source, written_by = by_step.get(start.step, (None, number))
        if source is not None and written_by < number and source.checksum != start.resumed:
            raise RunError(
                f"{source.path} is not the checkpoint that start {number} of the run resumed",
                expected=f"a manifest with the checksum {start.resumed}, which that start recorded",
                fix="copy it again from its source",
            )
    after = ", each after the one before" if len(identity.starts) > 1 else ""
    return [
        f"  chain: {counted(len(identity.starts), 'start')}{after}; checkpoints of them: {len(checkpoints)}"
    ]


def _byte_lines(run: Path, segments: Sequence[Segment], *, contents: bool) -> Iterator[str]:
    """Facts about the bytes; with contents, all blocks of the stores, if they are where they were."""
    if segments and (not contents or are_here(segments[-1].start)):
        config = loading.load(str(run / "config.yaml"), environ={}).config
        sampled = ALL if contents else SAMPLED
        yield from byte_lines(
            run, segments, Packing.of(config.data), cache=cache_folder(), sampled=sampled
        )


def _bits_of(past: RunRecord, first_step: int) -> str:
    """Whether a run was resumed at a step bit for bit; nothing without `train.reduce: exact`."""
    start: Values = next(
        (start for start in reversed(past.starts) if start.get("step") == first_step - 1), {}
    )
    lost = start.get("lost_bits")
    return (
        ""
        if lost is None
        else f", with other bits: {'; '.join(lost)}"
        if lost
        else ", bit for bit"
    )


def _shares(run: Path, start: SegmentLine) -> Iterator[str]:
    """The shares of a mixture that the run's config asks for, and those that its order keeps."""
    mixture = start.order.mixture
    if mixture is None:
        return
    with contextlib.suppress(OSError, ThreefoldError, AttributeError, KeyError, TypeError):
        sources = parse((run / "config.yaml").read_text(), "config.yaml")["data"]["mixture"]
        weights = {name: source["weight"] for name, source in sources.items()}
        asked = Mixture(dict(zip(mixture.names, mixture.sizes, strict=True)), weights)
        mixture = asked if asked.quotas == mixture.quotas else mixture
    yield f"  shares: {mixture.shares}"


def first_and_last_step(segments: Sequence[Segment]) -> tuple[int, int]:
    """The steps of a record that has an audit."""
    lasts = [
        line.first + segment.valid_batches(line) - 1
        for segment in segments
        for line in segment.steps
    ]
    return segments[0].start.first_step, max(lasts)
