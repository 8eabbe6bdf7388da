"""Exports of the model by transformers: read again, each must be the model that was in memory."""

import contextlib
import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from threefold.errors import first_line
from threefold.referee.judge.own_model import model_class
from threefold.referee.judge.parts import (
    JudgedPart,
    Refuted,
    Unjudgeable,
    judges,
    listed,
    none_here,
    proved,
)
from threefold.referee.judge.states import Described, differing, whole_state
from threefold.referee.rank.sealed import Values
from threefold.referee.rank.state import state_of
from threefold.referee.record import Records

# Only the last ones: a program may write hundreds.
_MOST_READ = 3
# Keys about loading a model, not about what it computes.
_NOT_COMPUTED = re.compile(
    "_name_or_path|architectures|(torch_)?dtype|transformers_version|use_cache|_?(attn|experts)_implementation|"
    "return_dict|output_(attentions|hidden_states)|id2label|label2id|problem_type"
)


@judges("exports")
def judge_exports(starts: Sequence[Records]) -> JudgedPart:
    """Whether the last exports of each start have the weights and the config that the model had."""
    written: dict[str, tuple[Records, int]] = {}
    for ranks in starts:
        for record in ranks:
            for each in record.exported:
                if each["module"] != record.placement.get("module"):
                    raise Unjudgeable(
                        f"{each['folder']} does not hold the model that is trained"
                    )
                written.pop(each["folder"], None)
                written[each["folder"]] = ranks, each["step"]
    if not written:
        return none_here("no model was written by transformers' save_pretrained")
    present = {
        folder: each
        for folder, each in written.items()
        if Path(folder, "config.json").is_file()
    }
    if not present:
        raise Unjudgeable(f"{next(iter(written))} is not here, or was removed")
    last = list(present.items())[-_MOST_READ:]
    for folder, (ranks, step) in last:
        try:
            wrong = _wrong(
                folder, _expected(ranks, folder, step), ranks[0].placement["architecture"]
            )
        except Unjudgeable as why:
            raise Unjudgeable(f"{folder}: {why}") from None
        if wrong is not None:
            raise Refuted(
                f"{folder} has {wrong}",
                f"the model as it was after step {step}",
                "what is written: a shard of weights, a name, a gather of parts on one rank, the config",
            )
    return proved(
        f"{len(last)} of {len(written)} folders read back have all weights and the config of the model"
    )


def _expected(ranks: Records, folder: str, step: int) -> Described:
    """The weights when a folder was written; of ranks that did not write it, when they saved after the same step."""
    mine = [
        each
        for record in ranks
        for each in record.exported
        if (each["folder"], each["step"]) == (folder, step)
    ]
    saved = [{**record.saved[step], "moments": {}} for record in ranks if step in record.saved]
    return whole_state([*mine, *saved]).weights


def _wrong(folder: str, expected: Described, architecture: Values) -> str | None:
    kind, _ = model_class(architecture)
    before = logging.root.manager.disable
    logging.disable()  # what transformers reports about a load is in the verdict
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model = kind.from_pretrained(
                folder, dtype="auto", use_safetensors=True, local_files_only=True
            )
    except (OSError, SafetensorError) as error:
        return f"no readable model ({first_line(error)})"
    except Exception as error:  # possibly only on this machine
        raise Unjudgeable(f"transformers does not load it here ({first_line(error)})") from None
    finally:
        logging.disable(before)
    values, saved = model.config.to_dict(), architecture["config"]
    for name in sorted(values.keys() & saved.keys()):
        if values[name] != saved[name] and not _NOT_COMPUTED.fullmatch(name):
            return f"{name} {values[name]!r} in its config, where the model has {saved[name]!r}"
    read = whole_state([state_of(model)]).weights
    if cast := {
        (read[name][0], kind)
        for name, (kind, *_) in expected.items()
        if read.get(name, (kind,))[0] != kind
    }:
        raise Unjudgeable(
            f"weights were written as {min(cast)[0]}, and are {min(cast)[1]} in memory"
        )
    if lost := sorted(differing(expected, read)):
        return f"{len(lost)} of {len(expected)} weights that have changed: {listed(lost)}"
    if not all(each.isfinite().all() for each in model.parameters()):
        raise Unjudgeable("its weights are the model's, but not all of them are finite")
    return None
