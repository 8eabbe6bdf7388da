"""Contradictions between the values of a config, each of which is valid by itself.

What the sizes of a mesh must divide, the global batch first, is checked in `mesh/divisibility.py`.
"""

import difflib
import itertools
from collections.abc import Iterator, Sequence

from threefold.config.objective import DpoConfig
from threefold.config.observation import TRACKERS, LogConfig
from threefold.config.optimizer_rules import of_optimizer
from threefold.config.schema import Config, DataConfig, LoraConfig
from threefold.config.yaml_text import as_yaml, to_set
from threefold.errors import Problem

MIXTURE_FIX = (
    "--data.mixture '{code: {source: FOLDER, weight: 0.7}, prose: {source: "
    "hf:ID, weight: 0.3}}'   (any names)"
)
# Rows times passes stay whole numbers in the records; more loader processes than cores only take turns.
_MOST_EPOCHS, _MOST_WORKERS = 1_000_000, 64
# Steps in a trace.
MOST_TRACED = 20


def contradictions(config: Config) -> Iterator[Problem]:
    """Keys whose values, each valid by itself, contradict one another."""
    yield from _of_mixture(config)
    if config.model.name_or_path is not None and config.model.config is not None:
        yield Problem(
            "model.name_or_path and model.config are both set",
            "one of them: trained weights by name, or random weights by their sizes",
            "leave one of them out",
        )
    elif config.model.config is not None and config.model.config.get("model_type") is None:
        yield Problem(
            "model.config has no model_type",
            "the architecture's name in transformers, next to its sizes",
            "--model.config '{model_type: llama, hidden_size: 128, num_hidden_layers: 4}'",
        )
    if config.model.init_missing and config.model.name_or_path is None:
        yield Problem(
            f"model.init_missing = {as_yaml(config.model.init_missing)} has no effect without model.name_or_path",
            "a model whose files may lack some weights; without one all weights are random",
            "leave model.init_missing out",
        )
    if config.data.allow_other_tokenizer and (
        config.model.name_or_path is None or config.data.tokenizer is None
    ):
        lacking = (
            "model.name_or_path" if config.model.name_or_path is None else "data.tokenizer"
        )
        yield Problem(
            f"data.allow_other_tokenizer = true has no effect without {lacking}",
            "pretrained weights, and a tokenizer other than their own",
            "leave data.allow_other_tokenizer out",
        )
    if config.train.steps is not None and config.train.epochs is not None:
        yield Problem(
            f"train.steps = {config.train.steps} and train.epochs = {config.train.epochs} are both set",
            "one measure of how long to train",
            "leave one of them out",
        )
    if config.train.epochs is not None and config.train.epochs > _MOST_EPOCHS:
        yield Problem(
            f"train.epochs = {config.train.epochs} is more than {_MOST_EPOCHS:,}",
            "passes that end and whose rows a run can count",
            "--train.epochs 3",
        )
    if config.data.num_workers > _MOST_WORKERS:
        yield Problem(
            f"data.num_workers = {config.data.num_workers} is more than {_MOST_WORKERS}",
            "processes per rank, which share its host's cores and memory: a few keep a rank busy",
            "--data.num_workers 4",
        )
    held_out = "--data.eval_share 0.01   (or --eval.source FILE_OR_FOLDER"
    if not config.evaluates and config.eval.every and not config.eval.tasks:
        yield Problem(
            f"eval.every = {config.eval.every} has no effect without eval.source or data.eval_share",
            "held-out data to evaluate on",
            f"{held_out}, or leave eval.every out)",
        )
    if config.eval.sample and (not config.evaluates or not config.log.sample_tokens):
        lacking = (
            "log.sample_tokens, which is 0"
            if config.evaluates
            else "eval.source or data.eval_share"
        )
        fix = "--log.sample_tokens 64   (or" if config.evaluates else f"{held_out}, or"
        yield Problem(
            f"eval.sample = {as_yaml(list(config.eval.sample))} has no effect without {lacking}",
            "an evaluation, after which tokens are generated",
            f"{fix} leave eval.sample out)",
        )
    lora = [
        name
        for name, value in config.model.lora
        if value != LoraConfig.model_fields[name].default
    ]
    if lora and not config.model.lora.r:
        yield Problem(
            f"model.lora.{lora[0]} has no effect without model.lora.r",
            "the rank of the adapters to train",
            f"--model.lora.r 16   (or leave model.lora.{lora[0]} out)",
        )
    yield from _of_float8(config)
    yield from _of_objective(config)
    yield from _of_lengths(config.data)
    yield from _of_skip(config.data.skip)
    yield from _of_profile(config)
    yield from _of_rows(config)
    yield from _of_trackers(config.log)
    yield from _of_exports(config)
    yield from of_optimizer(config)


def _of_float8(config: Config) -> Iterator[Problem]:
    if config.train.float8 == "none":
        return
    asked = f"train.float8 = {config.train.float8}"
    without = "leave train.float8 out"
    if config.model.dtype == "float32":
        yield Problem(
            f"{asked} with model.dtype = float32",
            "model.dtype bfloat16, whose largest products are then made of 8 bits",
            f"--model.dtype bfloat16   (or {without})",
        )
    if config.train.compile is False:
        yield Problem(
            f"{asked} with train.compile = false",
            "compiled layers: casts in kernels of their own take longer than the products save",
            f"--train.compile auto   (or {without})",
        )
    if config.model.lora.r:
        yield Problem(
            f"{asked} with model.lora.r = {config.model.lora.r}",
            "trained weights: it would compute gradients of frozen ones that nobody reads",
            without,
        )
    if config.data.group_by_length:
        yield Problem(
            f"{asked} with data.group_by_length = true",
            "rows of one length, a multiple of 16",
            f"leave data.group_by_length out, or {without}",
        )


def _of_objective(config: Config) -> Iterator[Problem]:
    """Contradictions to train.objective, whichever it is."""
    changed = [
        name for name, value in config.dpo if value != DpoConfig.model_fields[name].default
    ]
    if config.train.objective != "dpo":
        for name in changed[:1]:
            yield Problem(
                f"dpo.{name} has no effect with train.objective = {config.train.objective}",
                "train.objective dpo",
                f"--train.objective dpo   (or leave dpo.{name} out)",
            )
        return
    if config.data.format not in ("auto", "preference"):
        yield Problem(
            f"train.objective = dpo with data.format = {config.data.format}",
            "rows with a chosen and a rejected answer",
            "--data.format preference",
        )
    if config.dpo.label_smoothing and config.dpo.loss != "sigmoid":
        yield Problem(
            f"dpo.label_smoothing = {config.dpo.label_smoothing} has no effect with dpo.loss = {config.dpo.loss}",
            "dpo.loss sigmoid",
            "--dpo.loss sigmoid   (or leave dpo.label_smoothing out)",
        )
    for name, unset in (("label_smoothing", 0.0), ("z_loss", 0.0), ("fused_loss", "auto")):
        if (value := getattr(config.train, name)) not in (unset, False):
            expected = "train.objective next_token: the loss of pairs is computed from log-probabilities"
            fix = f"leave train.{name} out"
            if name == "label_smoothing":
                fix += ", or for swapped answers --dpo.label_smoothing 0.1"
            yield Problem(
                f"train.{name} = {value} has no effect with train.objective = dpo",
                expected,
                fix,
            )


def _of_lengths(data: DataConfig) -> Iterator[Problem]:
    if not data.group_by_length:
        return
    if data.packing != "none":
        yield Problem(
            f"data.group_by_length = true has no effect with data.packing = {data.packing or 'best_fit or concat'}",
            "data.packing none: rows of the others are full and of equal length",
            "--data.packing none   (or leave data.group_by_length out)",
        )
    if data.mixture is not None:
        yield Problem(
            "data.group_by_length = true with data.mixture",
            "one source: batches of similar length would not have the mixture's shares",
            "leave data.group_by_length out",
        )
    if not data.shuffle:
        yield Problem(
            "data.group_by_length = true with data.shuffle = false",
            "rows that may be reordered: without the shuffle they keep their order",
            "--data.shuffle true   (or leave data.group_by_length out)",
        )


def _of_exports(config: Config) -> Iterator[Problem]:
    exports, every = config.checkpoint.export_every, config.checkpoint.every
    if exports and (not every or exports % every):
        what = f"checkpoint.export_every = {exports}, but a checkpoint is saved "
        what += f"every {every} steps" if every else "at the end only"
        yield Problem(
            what,
            "a multiple of checkpoint.every",
            f"--checkpoint.every {exports}"
            if not every
            else f"--checkpoint.export_every {-(-exports // every) * every}",
        )


def _of_skip(skip: Sequence[tuple[int, int]]) -> Iterator[Problem]:
    for first, last in skip:
        if last < first:
            yield Problem(
                f"data.skip has [{first}, {last}], which ends before it begins",
                "[first, last], both steps included",
                f"--data.skip '[[{last}, {first}]]'",
            )
    firsts = [first for first, _ in skip]
    if any(later <= earlier for earlier, later in itertools.pairwise(firsts)):
        ascending = sorted({first: [first, last] for first, last in skip}.values())
        yield Problem(
            f"data.skip has ranges that begin with steps {', '.join(map(str, firsts))}: they do not ascend",
            "ranges in the order in which the run reaches them, each beginning with a different step",
            f"--data.skip '{ascending}'",
        )


def _of_profile(config: Config) -> Iterator[Problem]:
    if config.log.profile is None:
        return
    first, last = config.log.profile
    what = f"log.profile = [{first}, {last}]"
    fix = f"--log.profile '[{first}, {first + 2}]'"
    if last < first:
        yield Problem(
            f"{what} ends before it begins", "[first, last], both steps included", fix
        )
    elif last - first >= MOST_TRACED:
        yield Problem(
            f"{what} are {last - first + 1} steps",
            f"at most {MOST_TRACED} steps: a trace holds every kernel, and takes long to write and to open",
            fix,
        )
    if config.train.steps is not None and first > config.train.steps:
        yield Problem(
            f"{what} has no effect",
            f"steps of the run, which ends with step {config.train.steps}",
            "--log.profile '[3, 5]'   (or leave log.profile out)",
        )


def _of_rows(config: Config) -> Iterator[Problem]:
    if config.audit.rows is True and not config.audit.every:
        yield Problem(
            "audit.rows = true with audit.every = 0",
            "an audit: its record says which rows a step has read",
            "--audit.every 10   (or leave audit.rows out)",
        )


def _of_trackers(log: LogConfig) -> Iterator[Problem]:
    for name in dict.fromkeys(log.trackers):
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1, cutoff=0.4)
            yield to_set(
                f"{as_yaml(name)} in log.trackers is not a supported tracker"
                + (f"; near: {near[0]}" if near else ""),
                f"one of {', '.join(TRACKERS)}; metrics.jsonl is always written",
                "log.trackers",
                [near[0] if near else TRACKERS[0]],
            )
        elif log.trackers.count(name) > 1:
            once = [*dict.fromkeys(log.trackers)]
            yield to_set(
                f"log.trackers names {name} twice", "each tracker once", "log.trackers", once
            )
    if log.project != LogConfig().project and not {"wandb", "trackio", "mlflow"} & {
        *log.trackers
    }:
        what = f"log.project = {as_yaml(log.project)} has no effect without a tracker that has projects"
        expected = "wandb, trackio or mlflow among log.trackers"
        remark = "   (or leave log.project out)"
        yield to_set(what, expected, "log.trackers", ["wandb"], remark=remark)


def _of_mixture(config: Config) -> Iterator[Problem]:
    source, mixture = config.data.source, config.data.mixture
    if mixture is None:
        return
    if not mixture:
        yield Problem("data.mixture names no source", "at least one", MIXTURE_FIX)
    if source != DataConfig().source:
        yield Problem(
            f"data.source = {as_yaml(source)} and data.mixture are both set",
            "one of them: a mixture names all of its sources, each with a weight",
            f"leave data.source out, or add it to the mixture: {{source: {as_yaml(source)}, weight: 1}}",
        )
    if config.train.epochs is not None:
        yield Problem(
            f"train.epochs = {config.train.epochs} with data.mixture",
            "train.steps: a mixture has no end, because each of its sources starts over when it is exhausted",
            "--train.steps N, and leave train.epochs out",
        )
