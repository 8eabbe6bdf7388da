"""The model of a record as its program makes it, in one process: taken at its first step, where that process ends.

For models that are not of transformers, whose config does not tell what they compute. The answer lies in the folder of
the record, with the digest of what it was judged by.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import traceback
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from threefold.referee.judge.checked_steps import Unjudgeable
from threefold.referee.judge.curve import checked_steps
from threefold.referee.judge.gradients import GRADIENTS, judge_gradients
from threefold.referee.judge.groups import groups_of
from threefold.referee.judge.parts import not_judged, write_alone
from threefold.referee.rank.weights import unwrapped
from threefold.referee.record import read_command


def take_model(folder: Path) -> None:
    """Ends this process at the first call of the model that the record in `folder` is of, with its gradients judged."""
    groups = groups_of([record for record in read_command(folder).ranks if record.calls])
    names = set(groups.members[0][0].placement["parameters"])
    call = torch.nn.Module.__call__
    local = threading.local()

    @wraps(call)
    def watched(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inner = getattr(local, "is_inner", False)
        if not is_inner and self.training and {name for name, _ in self.named_parameters()} == names:
            torch.nn.Module.__call__ = call
            _judge_and_end(folder, self)
        local.is_inner = True
        try:
            return call(self, *args, **kwargs)
        finally:
            local.is_inner = is_inner

    torch.nn.Module.__call__ = watched


def _judge_and_end(folder: Path, module: torch.nn.Module) -> None:
    code = 0
    try:
        model = unwrapped(module)
        if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
            model = copy.deepcopy(model)  # without the hooks that change gradients
        groups = groups_of([record for record in read_command(folder).ranks if record.calls])
        try:
            parts = judge_gradients(checked_steps(folder, groups), groups.members[0][0].placement, model)
        except Unjudgeable as why:
            parts = [not_judged(GRADIENTS, str(why))]
        write_alone(folder, parts)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of the program runs any more: no save, no upload.
    os._exit(code)
