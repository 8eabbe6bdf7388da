"""What does not go together in a config whose values are each right by themselves."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence

from threefold.config.schema import TRACKERS, Config, DataConfig, LogConfig, LoraConfig, ModelConfig
from threefold.config.text import as_yaml, pasted
from threefold.errors import Problem

MIXTURE_FIX = (
    "--data.mixture '{code: {source: FOLDER, weight: 0.7}, prose: {source: hf:ID, weight: 0.3}}'   (any names)"
)


def contradictions(config: Config) -> list[Problem]:
    """Keys whose values, each right by itself, do not go together; empty where all do."""
    found = _mixture_contradictions(config)
    if config.model.name_or_path is not None and config.model.config is not None:
        found.append(
            Problem(
                "model.name_or_path and model.config are both set",
                "one of them: trained weights by name, or random ones by sizes",
                "leave one of them out",
            )
        )
    if config.model.init_missing and config.model.name_or_path is None:
        found.append(
            Problem(
                f"model.init_missing = {as_yaml(config.model.init_missing)} has no effect without model.name_or_path",
                "a model whose files may lack some weights; without one all weights are random",
                "leave model.init_missing out",
            )
        )
    if config.train.steps is not None and config.train.epochs is not None:
        found.append(
            Problem(
                f"train.steps = {config.train.steps} and train.epochs = {config.train.epochs} are both set",
                "one measure of how long to train",
                "leave one of them out",
            )
        )
    if config.eval.source is None and config.eval.every:
        found.append(
            Problem(
                f"eval.every = {config.eval.every} has no effect without eval.source",
                "held-out data to evaluate on",
                "--eval.source FILE_OR_FOLDER, or leave eval.every out",
            )
        )
    found += _lora_problems(config.model)
    found += _skip_problems(config.data.skip)
    found += _tracker_problems(config.log)
    for number, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            found.append(
                Problem(
                    f"optimizer.betas[{number}] = {beta} is not a decay",
                    "0 <= beta < 1",
                    "--optimizer.betas '[0.9, 0.95]'",
                )
            )
    if config.optimizer.min_lr > config.optimizer.lr:
        found.append(
            Problem(
                f"optimizer.min_lr = {config.optimizer.min_lr} is above optimizer.lr = {config.optimizer.lr}",
                "a schedule that falls from lr to min_lr",
                f"--optimizer.min_lr 0   (or raise optimizer.lr above {config.optimizer.min_lr})",
            )
        )
    return found


def _skip_problems(skip: Sequence[tuple[int, int]]) -> list[Problem]:
    found = [
        Problem(
            f"data.skip has [{first}, {last}], which ends before it begins",
            "[first, last], both steps included",
            f"--data.skip '[[{last}, {first}]]'",
        )
        for first, last in skip
        if last < first
    ]
    firsts = [first for first, _ in skip]
    if any(later <= earlier for earlier, later in itertools.pairwise(firsts)):
        ascending = sorted({first: [first, last] for first, last in skip}.values())
        found.append(
            Problem(
                f"data.skip has ranges that begin with steps {', '.join(map(str, firsts))}: they do not ascend",
                "the ranges in the order in which the run comes to them, each beginning with another step",
                f"--data.skip '{ascending}'",
            )
        )
    return found


def _tracker_problems(log: LogConfig) -> list[Problem]:
    found = []
    for name in dict.fromkeys(log.trackers):
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1, cutoff=0.4)
            found.append(
                Problem(
                    f"log.trackers has {as_yaml(name)}, which is none" + (f"; near: {near[0]}" if near else ""),
                    f"of {', '.join(TRACKERS)}; metrics.jsonl is always written",
                    f"--log.trackers '[{near[0] if near else TRACKERS[0]}]'",
                )
            )
        elif log.trackers.count(name) > 1:
            found.append(
                Problem(
                    f"log.trackers names {name} twice",
                    "each once",
                    f"--log.trackers {pasted([*dict.fromkeys(log.trackers)])}",
                )
            )
    if log.project != LogConfig().project and not {"wandb", "trackio"} & {*log.trackers}:
        found.append(
            Problem(
                f"log.project = {as_yaml(log.project)} has no effect without a tracker that has projects",
                "wandb or trackio among log.trackers",
                "--log.trackers '[wandb]', or leave log.project out",
            )
        )
    return found


def _mixture_contradictions(config: Config) -> list[Problem]:
    source, mixture = config.data.source, config.data.mixture
    found: list[Problem] = []
    if mixture is None:
        return found
    if not mixture:
        found.append(Problem("data.mixture names no source", "at least one", MIXTURE_FIX))
    if source != DataConfig().source:
        found.append(
            Problem(
                f"data.source = {source} and data.mixture are both set",
                "one of them: a mixture names all of its sources itself, each with a weight",
                f"leave data.source out, or make it one of the mixture: {{source: {as_yaml(source)}, weight: 1}}",
            )
        )
    if config.train.epochs is not None:
        found.append(
            Problem(
                f"train.epochs = {config.train.epochs} with data.mixture",
                "train.steps: a mixture has no end of its own, each of its sources begins again when it is through",
                "--train.steps N, and leave train.epochs out",
            )
        )
    return found


def _lora_problems(model: ModelConfig) -> list[Problem]:
    given = [name for name, value in model.lora if value != LoraConfig.model_fields[name].default]
    if model.lora.r or not given:
        return []
    return [
        Problem(
            f"model.lora.{given[0]} has no effect without model.lora.r",
            "the rank of the adapters that are to be trained",
            f"--model.lora.r 16, or leave model.lora.{given[0]} out",
        )
    ]
