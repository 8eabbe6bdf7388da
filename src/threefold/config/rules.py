"""Contradictions between the values of a config, each of which is valid by itself."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence

from threefold.config.peak_rate import peak_rate
from threefold.config.schema import TRACKERS, Config, DataConfig, LogConfig, LoraConfig
from threefold.config.text import as_yaml, pasted
from threefold.errors import Problem

MIXTURE_FIX = (
    "--data.mixture '{code: {source: FOLDER, weight: 0.7}, prose: {source: hf:ID, weight: 0.3}}'   (any names)"
)


def contradictions(config: Config) -> Iterator[Problem]:
    """Keys whose values, each valid by itself, contradict one another."""
    yield from _of_mixture(config)
    if config.model.name_or_path is not None and config.model.config is not None:
        expected = "one of them: trained weights by name, or random ones by sizes"
        yield Problem("model.name_or_path and model.config are both set", expected, "leave one of them out")
    if config.model.init_missing and config.model.name_or_path is None:
        what = f"model.init_missing = {as_yaml(config.model.init_missing)} has no effect without model.name_or_path"
        fix = "leave model.init_missing out"
        yield Problem(what, "a model whose files may lack some weights; without one all weights are random", fix)
    if config.data.allow_other_tokenizer and (config.model.name_or_path is None or config.data.tokenizer is None):
        lacking = "model.name_or_path" if config.model.name_or_path is None else "data.tokenizer"
        what = f"data.allow_other_tokenizer = true has no effect without {lacking}"
        expected = "pretrained weights, and a tokenizer for them that is not their own"
        yield Problem(what, expected, "leave data.allow_other_tokenizer out")
    if config.train.steps is not None and config.train.epochs is not None:
        what = f"train.steps = {config.train.steps} and train.epochs = {config.train.epochs} are both set"
        yield Problem(what, "one measure of how long to train", "leave one of them out")
    if config.eval.source is None and config.eval.every:
        what = f"eval.every = {config.eval.every} has no effect without eval.source"
        yield Problem(what, "held-out data to evaluate on", "--eval.source FILE_OR_FOLDER, or leave eval.every out")
    lora = [name for name, value in config.model.lora if value != LoraConfig.model_fields[name].default]
    if lora and not config.model.lora.r:
        what = f"model.lora.{lora[0]} has no effect without model.lora.r"
        fix = f"--model.lora.r 16, or leave model.lora.{lora[0]} out"
        yield Problem(what, "the rank of the adapters to train", fix)
    yield from _of_skip(config.data.skip)
    yield from _of_trackers(config.log)
    for number, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            what = f"optimizer.betas[{number}] = {beta} is not a decay"
            yield Problem(what, "0 <= beta < 1", "--optimizer.betas '[0.9, 0.95]'")
    lr, why = peak_rate(config)
    if config.optimizer.min_lr > lr:
        automatic = f" (auto: {why})" if config.optimizer.lr == "auto" else ""
        what = f"optimizer.min_lr = {config.optimizer.min_lr} is above optimizer.lr = {lr}{automatic}"
        fix = f"--optimizer.min_lr 0   (or raise optimizer.lr above {config.optimizer.min_lr})"
        yield Problem(what, "a schedule that falls from lr to min_lr", fix)


def _of_skip(skip: Sequence[tuple[int, int]]) -> Iterator[Problem]:
    for first, last in skip:
        if last < first:
            what = f"data.skip has [{first}, {last}], which ends before it begins"
            yield Problem(what, "[first, last], both steps included", f"--data.skip '[[{last}, {first}]]'")
    firsts = [first for first, _ in skip]
    if any(later <= earlier for earlier, later in itertools.pairwise(firsts)):
        ascending = sorted({first: [first, last] for first, last in skip}.values())
        what = f"data.skip has ranges that begin with steps {', '.join(map(str, firsts))}: they do not ascend"
        expected = "ranges in the order in which the run reaches them, each beginning with a different step"
        yield Problem(what, expected, f"--data.skip '{ascending}'")


def _of_trackers(log: LogConfig) -> Iterator[Problem]:
    for name in dict.fromkeys(log.trackers):
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1, cutoff=0.4)
            yield Problem(
                f"{as_yaml(name)} in log.trackers is not a supported tracker" + (f"; near: {near[0]}" if near else ""),
                f"one of {', '.join(TRACKERS)}; metrics.jsonl is always written",
                f"--log.trackers '[{near[0] if near else TRACKERS[0]}]'",
            )
        elif log.trackers.count(name) > 1:
            once = pasted([*dict.fromkeys(log.trackers)])
            yield Problem(f"log.trackers names {name} twice", "each tracker once", f"--log.trackers {once}")
    if log.project != LogConfig().project and not {"wandb", "trackio"} & {*log.trackers}:
        what = f"log.project = {as_yaml(log.project)} has no effect without a tracker that has projects"
        yield Problem(what, "wandb or trackio among log.trackers", "--log.trackers '[wandb]', or leave log.project out")


def _of_mixture(config: Config) -> Iterator[Problem]:
    source, mixture = config.data.source, config.data.mixture
    if mixture is None:
        return
    if not mixture:
        yield Problem("data.mixture names no source", "at least one", MIXTURE_FIX)
    if source != DataConfig().source:
        what = f"data.source = {as_yaml(source)} and data.mixture are both set"
        fix = f"leave data.source out, or add it to the mixture: {{source: {as_yaml(source)}, weight: 1}}"
        yield Problem(what, "one of them: a mixture names all of its sources, each with a weight", fix)
    if config.train.epochs is not None:
        what = f"train.epochs = {config.train.epochs} with data.mixture"
        expected = "train.steps: a mixture has no end, because each of its sources starts over when it is exhausted"
        yield Problem(what, expected, "--train.steps N, and leave train.epochs out")
