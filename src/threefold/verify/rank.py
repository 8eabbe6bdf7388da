"""One rank of a verification: the mesh's steps compared with the single process, which rank 0 runs first."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from threefold.check.admit import RefusedError, admit
from threefold.check.compare import (
    FINITE,
    GRADIENT,
    OUTPUT,
    Difference,
    TensorComparison,
    Training,
    compare_tensors,
    complete_gradients,
)
from threefold.check.reference import run_alone
from threefold.checkpoint.manifest import architecture_of, with_infinities
from threefold.config.loading import validate
from threefold.config.paths import tokenizer_name
from threefold.config.schema import Config
from threefold.data.rows.concat import Rows
from threefold.data.sampling.loader import TokenLoader
from threefold.errors import EXIT_FAILED
from threefold.jsonl import as_json
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.build import build
from threefold.model.collectives import gather_parts, local_part
from threefold.model.context_parallel.positions import gathered_positions
from threefold.model.load import layers_of
from threefold.model.model import Model
from threefold.optim.build import build_optimizer
from threefold.optim.schedule import learning_rate
from threefold.plan import choices
from threefold.progress_bars import Bars
from threefold.run import assemble, request
from threefold.run.dpo import pairs_of
from threefold.run.process import as_rank
from threefold.run.sources import file_lines, with_packing
from threefold.training.batches import micro_batches
from threefold.training.numbers import StepResult, mean_loss
from threefold.training.step import TrainStep
from threefold.verify.verdict import Verification, VerifyOptions, answer_of, table


def verify_rank(
    config: Config, options: VerifyOptions, topology: Topology, answer: str | None
) -> int:
    """Compares as one rank; rank 0 writes the comparison to `answer`, or prints it without one."""

    def work(mesh: Mesh) -> int:
        verification = verify_on(mesh, config, options)
        if mesh.rank != 0:
            return 0
        if answer is not None:
            Path(answer).write_text(json.dumps(verification.to_record()))
            return 0
        if options.as_json:
            print(as_json(answer_of(verification, topology)), flush=True)
        else:
            files = [f"files: {line}" for line in file_lines(config)]
            verdict = "follows" if verification.holds else "differs from"
            print(
                "\n".join(
                    [*files, *table(verification), f"the mesh {verdict} the single process"]
                )
            )
        return 0 if verification.holds else EXIT_FAILED

    return as_rank(config, topology, work)


def _as_compared(config: Config, topology: Topology) -> Config:
    """In float32, and without settings that do not change the numbers but may not fit a single axis."""
    values = config.model_dump()
    values["model"]["dtype"] = "float32"
    values["model"]["lora"]["dropout"] = 0.0
    ep = config.mesh.ep if config.mesh.ep == topology.tp else 1
    values["mesh"].update(cpu_offload=False, ep=ep)
    values["train"].update(float8="none")
    # An order without an end: the steps to compare may be more than an epoch's.
    values["train"]["epochs"] = None
    return validate(values)


def verify_on(mesh: Mesh, config: Config, options: VerifyOptions) -> Verification:
    """Compares an existing mesh with one process; the result is complete on rank 0. Every rank calls it."""
    config = _as_compared(config.with_rate(config.peak_rate[0]), mesh.topology)
    config, architecture, rows = opened(config, mesh, options)
    verification = Verification()
    if options.admission:
        verification.admitted, verification.admission = _admission(config, architecture, mesh)
    observed = config.train.global_batch // mesh.dp_size

    def alone() -> list[list[float]]:
        order = assemble.order_of(config, rows)
        loader = iter(
            TokenLoader(
                rows, order, dp_rank=0, dp_size=1, document_mask=bool(config.data.document_mask)
            )
        )
        # The rows of dp rank 0 come first, because the outputs of the first rows are kept.
        first = [
            place
            for dp in range(mesh.dp_size)
            for place in range(dp, config.train.global_batch, mesh.dp_size)
        ]
        batches = [
            {name: values[first] for name, values in next(loader).items()}
            for _ in range(options.steps)
        ]
        batches = [
            {name: values for name, values in batch.items() if name != "indices"}
            for batch in batches
        ]
        trainings.append(
            run_alone(
                config, architecture, batches, num_steps=options.steps, observed_rows=observed
            )
        )
        return [trainings[0].losses, trainings[0].norms]

    trainings: list[Training] = []
    bars = Bars(quiet=mesh.rank != 0)
    with bars.show("one process"):
        losses, norms = mesh.share("alone", alone)
    model = build(config, architecture, mesh)
    observe = _gradient_comparison(
        model, trainings[0].gradients if trainings else {}, verification
    )
    optimizer = build_optimizer(model.module, config.optimizer, mesh, working=model.working)
    pairs = pairs_of(
        config,
        model,
        rows,
        None,
        resumed=None,
        say=print if mesh.rank == 0 else lambda line: None,
    )
    own: dict[str, Any] = (
        {"loss": pairs.loss, "loss_on": "log_probabilities"} if pairs is not None else {}
    )
    outputs = _watch(model.module)
    step = TrainStep(
        model,
        optimizer,
        **own,
        grad_clip=config.train.grad_clip,
        observe=observe,
        compare_copies=False,
    )
    loader = iter(assemble.loader_of(config, rows, mesh))
    micro_batch = choices.micro_batch(config, mesh.topology).value
    for number in bars.track(range(1, options.steps + 1), f"the mesh, {mesh.topology}"):
        batch = next(loader)
        lr = learning_rate(number, num_steps=options.steps, config=config.optimizer)
        result = step.run(micro_batches(batch, micro_batch), lr=lr)
        verification.losses.append((mean_loss(result, mesh), losses[number - 1]))
        verification.norms.append((result.grad_norm.item(), norms[number - 1]))
        verification.not_finite += _not_finite(number, result, model)
        if number == 1:
            expected = trainings[0].outputs if trainings else []
            verification.departed_layer = _first_departure(outputs, expected, model, mesh)
    return verification


def _admission(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> tuple[bool, str]:
    try:
        return True, ": ".join(admit(config, architecture, mesh))
    except RefusedError as error:
        return False, str(error)


def opened(
    config: Config, mesh: Mesh, options: VerifyOptions
) -> tuple[Config, PretrainedConfig, Rows]:
    """The request that the options leave of a run's, checked, with its rows; every rank calls it."""
    tokenizer, architecture = request.model_of(config)
    config, architecture = _cut(config, architecture, options)
    config = with_packing(config, mesh)
    request.check(config, architecture, tokenizer, mesh.topology, device=mesh.device.type)
    vocab_size = architecture.get_text_config().vocab_size
    return (
        config,
        architecture,
        assemble.rows_of(config, tokenizer, mesh, vocab_size=vocab_size),
    )


def _cut(
    config: Config, architecture: PretrainedConfig, options: VerifyOptions
) -> tuple[Config, PretrainedConfig]:
    """The model with as many layers, and of such weights, as the options say."""
    text = architecture.get_text_config()
    if options.layers is not None and options.layers < text.num_hidden_layers:
        text.num_hidden_layers = options.layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: options.layers]
    if options.random and config.model.name_or_path is not None:
        values = config.model_dump()
        values["data"].update(tokenizer=tokenizer_name(config)[0], allow_other_tokenizer=False)
        drawn = with_infinities(architecture_of(architecture))
        for path in load.unknown_keys(architecture.model_type, drawn):
            *owners, key = path.split(".")
            # A note in the model's config.json.
            del functools.reduce(dict.__getitem__, owners, drawn)[key]
        values["model"].update(name_or_path=None, revision=None, config=drawn)
        config = validate(values)
    return config, architecture


def _watch(model: Any) -> list[list[Tensor]]:
    """For each layer a list that collects its outputs, one per micro-batch."""
    outputs: list[list[Tensor]] = []
    for layer in layers_of(model):
        kept: list[Tensor] = []
        outputs.append(kept)

        def keep(
            module: nn.Module, inputs: Any, output: Any, kept: list[Tensor] = kept
        ) -> None:
            if torch.is_grad_enabled():  # a reference computes without
                kept.append((output[0] if isinstance(output, tuple) else output).detach())

        layer.register_forward_hook(keep)
    return outputs


def _gradient_comparison(
    model: Model, expected: dict[str, Tensor], verification: Verification
) -> Callable[[], None]:
    """Compares each complete gradient with the single process' on rank 0, at the first call; every rank calls it."""
    comparison = TensorComparison(GRADIENT, expected)

    def observe() -> None:
        if verification.gradients:
            return
        for name, gradient in complete_gradients(model):
            if model.mesh.rank == 0:
                comparison.add(name, gradient)
        verification.gradients = comparison.differences()

    return observe


def _not_finite(number: int, result: StepResult, model: Model) -> list[Difference]:
    """Non-finite values after a step: losses of micro-batches and weights, by rank; every rank calls it."""
    losses = [
        place for place, loss in enumerate(result.micro_losses) if not loss.isfinite().all()
    ]
    local = (
        (name, local_part(parameter)) for name, parameter in model.module.named_parameters()
    )
    own = {
        "losses": losses,
        "weight": next((name for name, part in local if not part.isfinite().all()), None),
    }
    ranks: list[dict[str, Any]] = model.mesh.decide(f"finite/{number}", own, list)
    texts = []
    for rank, part in enumerate(ranks):
        if part["losses"]:
            texts.append(
                f"the loss of rank {rank} is not finite, in micro-batch {part['losses'][0]}"
            )
        if part["weight"] is not None:
            texts.append(f"the weight {part['weight']} of rank {rank} is not finite")
    return [
        Difference(FINITE.quantity, math.inf, FINITE.limit, f"step {number}", text)
        for text in texts
    ]


def _first_departure(
    outputs: list[list[Tensor]], expected: list[Tensor], model: Model, mesh: Mesh
) -> int | None:
    """Number of the first layer whose output on dp rank 0 differs; known on rank 0. Every rank calls it."""
    group = mesh.group("cp")
    departed = None
    for number, kept in enumerate(outputs):
        local = torch.cat(kept)
        if model.tensor.sequence_group is not None:
            local = gather_parts(local, model.tensor.sequence_group)
        parts = [torch.empty_like(local) for _ in range(mesh.cp_size)]
        if group is not None:
            dist.all_gather(parts, local.contiguous(), group=group)
        else:
            parts = [local]
        if mesh.rank == 0 and departed is None:
            whole = torch.empty_like(expected[number])
            whole[:, gathered_positions(whole.shape[1], cp_size=mesh.cp_size)] = torch.cat(
                parts, dim=1
            ).cpu()
            if not all(
                each.holds
                for each in compare_tensors(OUTPUT, {"": whole}, {"": expected[number]})
            ):
                departed = number
    return departed
