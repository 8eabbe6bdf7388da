"""The model of a record as its program makes it, in one process: taken at its first step, where that process ends.

For models that are not of transformers, whose config does not show what they compute. The answer is in the folder of
the record, with the digest of what it was judged by.
"""

import copy
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from threefold.referee.judge.checked_steps import checked_steps
from threefold.referee.judge.gradients import GRADIENTS, judge_gradients
from threefold.referee.judge.groups import RankGroups, groups_of
from threefold.referee.judge.parts import Unjudgeable, not_judged, write_alone
from threefold.referee.rank.weights import unwrapped
from threefold.referee.record import read_command


def take_model(folder: Path) -> None:
    """Ends this process at the first call of the model that the record in `folder` is of, with its gradients judged."""
    groups = groups_of([record for record in read_command(folder).ranks if record.calls])
    names = set(groups.records[0].placement["parameters"])

    def called(module: Module, args: Any) -> None:
        # A wrapper has its own names, and is called before what it wraps.
        if module.training and {name for name, _ in module.named_parameters()} == names:
            hook.remove()
            _judge_and_end(folder, groups, module)

    hook = register_module_forward_pre_hook(called)


def _judge_and_end(folder: Path, groups: RankGroups, module: Module) -> None:
    code = 0
    try:
        model = unwrapped(module)
        if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
            model = copy.deepcopy(model)  # without the hooks that change gradients
        try:
            steps = checked_steps(folder, groups)
            part = judge_gradients(steps, groups.records[0].placement, model)
        except Unjudgeable as why:
            part = not_judged(GRADIENTS, why)
        write_alone(folder, part)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    # Nothing of the program runs any more: no save, no upload.
    os._exit(code)
