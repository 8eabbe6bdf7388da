"""What transformers has written of the model: read again, it must be the model that was in memory."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from threefold.referee.judge.checked_steps import Unjudgeable
from threefold.referee.judge.own_model import model_class
from threefold.referee.judge.parts import JudgedPart, none_here, not_judged, proved, refuted
from threefold.referee.judge.states import WEIGHT, UnknownState, WholeState, whole_state
from threefold.referee.rank.state import state_of
from threefold.referee.record import RankRecord

EXPORTS = "exports"

# Of the last ones: a program may write hundreds.
_MOST_READ = 3
# What says how a model is loaded, not what it computes.
_NOT_COMPUTED = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
    *("return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
}


def judge_exports(starts: Sequence[Sequence[RankRecord]]) -> JudgedPart:
    """Whether the last exports of each start have the weights and the config that the model had."""
    written: dict[str, tuple[Sequence[RankRecord], int]] = {}
    for ranks in starts:
        for record in ranks:
            for each in record.exported:
                if each["module"] is not None and each["module"] != record.placement.get("module"):
                    return not_judged(EXPORTS, f"{each['folder']} holds another model than the one that is trained")
                written.pop(each["folder"], None)
                written[each["folder"]] = ranks, each["step"]
    if not written:
        return none_here(EXPORTS, "no model was written by transformers' save_pretrained")
    there = {folder: each for folder, each in written.items() if Path(folder, "config.json").is_file()}
    if not there:
        return not_judged(EXPORTS, f"{next(iter(written))} is not here, or no longer")
    count = 0
    for folder, (ranks, step) in list(there.items())[-_MOST_READ:]:
        try:
            expected = _expected(ranks, folder, step)
            wrong = _wrong(folder, expected, ranks[0].placement["architecture"])
        except (Unjudgeable, UnknownState) as why:
            return not_judged(EXPORTS, f"{folder}: {why}")
        if wrong is not None:
            return refuted(
                EXPORTS,
                f"{folder} has {wrong}",
                expected=f"the model as it was after step {step}",
                where="what is written: a shard of weights, a name, a gather of parts on one rank, the config",
            )
        count += 1
    return proved(EXPORTS, f"{count} of {len(written)} folders read again have each weight and the config of the model")


def _expected(ranks: Sequence[RankRecord], folder: str, step: int) -> WholeState:
    """The weights when a folder was written; of ranks that did not write it, when they saved after the same step."""
    if ranks[0].placement.get("how") == "FullyShardedDataParallel":
        raise UnknownState("FullyShardedDataParallel does not show which part of a parameter a rank holds")
    mine = [each for record in ranks for each in record.exported if (each["folder"], each["step"]) == (folder, step)]
    if any(each["module"] is None for each in mine):
        raise UnknownState("it is not the model that is trained that was written")
    saved = [{**record.saved[step], "moments": {}} for record in ranks if step in record.saved]
    return whole_state([*mine, *saved])


def _wrong(folder: str, expected: WholeState, architecture: dict[str, Any]) -> str | None:
    kind, _ = model_class(architecture)
    try:
        with _silently():
            model = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, local_files_only=True)
    except (OSError, SafetensorError) as error:
        return f"no model that can be read ({str(error).splitlines()[0]})"
    except Exception as error:  # it may be this machine that cannot
        raise UnknownState(f"transformers does not load it here ({str(error).splitlines()[0]})") from None
    values, known = model.config.to_dict(), architecture["config"]
    for name in sorted((values.keys() & known.keys()) - _NOT_COMPUTED):
        if values[name] != known[name]:
            return f"{name} {values[name]!r} in its config, where the model has {known[name]!r}"
    read = whole_state([state_of(model)])
    types = {name: (read[name][0], value[0]) for name, value in expected.items() if name in read}
    if cast := {pair for pair in types.values() if pair[0] != pair[1]}:
        raise UnknownState(f"weights were written as {min(cast)[0]}, and are {min(cast)[1]} in memory")
    lost = sorted(name for name, key in expected if key == WEIGHT and expected[name, key] != read.get((name, key)))
    if not lost:
        return None
    shown = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    return f"{len(lost)} of {len(expected)} weights that are not as they were: {shown}"


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """What transformers says of a load is in the verdict."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
