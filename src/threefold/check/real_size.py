"""The mesh compared with one process at the model's real width and row length, for a few of its layers.

The probes of `check.probes` look at a small model and short rows. Here the layers have their real sizes and windows,
and a row is as long as the run's, or as long as time and memory allow: the loss of every token on the mesh is that of
transformers' own model in one process, each document alone. Forward only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from threefold.arrays import Array
from threefold.check.compare import REAL_SIZE, Difference
from threefold.check.probe_rows import Batch, Mode, probe_rows, row_length
from threefold.check.reference import documents_of, perturbed_model
from threefold.config.schema import Config, LoraConfig
from threefold.data.rows.concat import IGNORED
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.build import build
from threefold.model.context_parallel.positions import local_positions
from threefold.model.layer_kinds import common_number
from threefold.model.load import layers_of, outline
from threefold.model.reduced import reduced, shallow
from threefold.training.forward import token_loss_of

NOT_COMPARED = "not compared"
# What one process may take for it: parameters, operations of its forward, and numbers in one layer's attention. So both
# comparisons take at most 10 s: of 2.3e11 operations, 2.6 s in one process of 2 cores, 4.7 s on 2 ranks.
_MOST_PARAMETERS = {"cpu": 5e7, "cuda": 5e8}
_MOST_OPERATIONS = {"cpu": 2.6e11, "cuda": 2e13}
_MOST_SCORES = {"cpu": 3e8, "cuda": 1e9}
# A number in the attention of one head passes through memory about ten times, in the time of so many operations.
_OF_A_SCORE = 400
# The row is compared in parts. A router's near tie, decided differently by another rounding, moves the loss of a few
# tokens; a wrong computation from some place on moves all of a part.
_PARTS = 32


@dataclass(frozen=True)
class RealSize:
    """The sizes to compare at.

    Attributes:
        architecture: with a few layers.
        seq_len: tokens of its row.
        width: for the head of a run: `at its real width`.
    """

    architecture: PretrainedConfig
    seq_len: int
    width: str


def real_sizes(
    config: Config,
    architecture: PretrainedConfig,
    topology: Topology,
    *,
    ranks: int,
    leading: int,
    share: float = 1.0,
) -> tuple[RealSize, ...]:
    """What can be compared for a run: its real width, and a reduced width; each as far as time and memory allow.

    Args:
        ranks, leading: as for `reduced`.
        share: of what a rank computes at other times, where many ranks share a core.
    """
    whole, device = config.data.seq_len, config.mesh.device
    unit = row_length(topology)
    kind = (
        "cuda"
        if device == "cuda" or (device == "auto" and torch.cuda.is_available())
        else "cpu"
    )
    candidates = (
        ("at its real width", lambda: shallow(architecture, ranks=ranks, leading=leading)),
        (
            "at a reduced width",
            lambda: reduced(
                architecture, ranks=ranks, seq_len=whole, real_seq_len=whole, leading=leading
            ),
        ),
    )
    sizes: list[RealSize] = []
    for width, make in candidates:
        try:
            cut = make()
            module = outline(cut, config.model)
        except Exception:
            # Any refusal by a config's class: its values may depend on those that are cut.
            continue
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if parameters > _MOST_PARAMETERS[kind]:
            continue
        text = cut.get_text_config()
        heads, hidden = (
            common_number(text, name) or 1 for name in ("num_attention_heads", "hidden_size")
        )
        # Operations of T tokens: 2 x parameters x T + pairs x T^2.
        pairs = max(1, len(layers_of(module))) * (4 * hidden + _OF_A_SCORE * heads)
        most = math.sqrt(parameters**2 + pairs * share * _MOST_OPERATIONS[kind]) - parameters
        tokens = min(whole, most / pairs, math.sqrt(_MOST_SCORES[kind] / heads))
        if seq_len := int(tokens) // unit * unit:
            sizes.append(RealSize(cut, seq_len, width))
    return tuple(sizes)


def compare_real_sizes(
    config: Config, sizes: Iterable[RealSize], mode: Mode, mesh: Mesh, *, seed: int
) -> list[Difference]:
    """The comparison at the real width, and at a reduced one if that reaches further; every rank calls it."""
    results, reached = list[Difference](), 0
    for asked in sizes:
        if asked.seq_len > reached:
            results.append(_compare(config, asked, mode, mesh, seed=seed))
            reached = asked.seq_len if results[-1].quantity == REAL_SIZE.quantity else 0
    return results


def _compare(
    config: Config, asked: RealSize, mode: Mode, mesh: Mesh, *, seed: int
) -> Difference:
    """How far the loss of a token on the mesh is from that of one process; every rank calls it.

    Of the quantity `NOT_COMPARED` if transformers' own forward cannot be computed at this size.
    """
    alone = perturbed_model(asked.architecture, config.model, seed=seed)
    vocabulary = asked.architecture.get_text_config().vocab_size
    rows = probe_rows(mode, seq_len=asked.seq_len, vocabulary=vocabulary, seed=seed)
    row = 2 if mode.documents else -1  # of several documents, or with padding
    batch = {name: values[row][None] for name, values in rows.items()}
    counted = (batch["labels"][0] != IGNORED).numpy()
    expected = mesh.share("own losses", lambda: _own_losses(alone, batch, mesh.device))
    if isinstance(expected, str):
        return Difference(NOT_COMPARED, 0.0, 0.0, detail=f"not {asked.width}: {expected}")
    weights = {
        name: partial(Tensor.detach, tensor) for name, tensor in alone.state_dict().items()
    }
    real = config.changed(
        data={"seq_len": asked.seq_len},
        train={"loss_chunk_tokens": "auto"},
        # Adapters change nothing as they begin.
        model={"lora": LoraConfig()},
    )
    model = build(real, asked.architecture, mesh, weights=weights)
    with torch.no_grad(), model.computing(batch) as local:
        own = model.outputs(local, "log_probabilities", token_loss=token_loss_of(model)).values
    places = local_positions(asked.seq_len, cp_size=mesh.cp_size, cp_rank=mesh.cp_rank)
    bits = (-own[0]).double().cpu().numpy().view(np.int64)
    of_ranks = mesh.gather(np.concatenate([places.numpy(), bits]))
    figure = max(_difference(part, np.array(expected), counted) for part in of_ranks)
    return Difference(
        REAL_SIZE.quantity,
        figure,
        REAL_SIZE.limit,
        detail=f"to token {asked.seq_len:,} {asked.width}",
    )


def _own_losses(model: Any, batch: Batch, device: torch.device) -> list[float] | str:
    """The loss of each token of the row in one process; or why it cannot be computed."""
    try:
        return _losses(model, batch, device)
    except Exception as error:  # whatever a model's code may raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]


@torch.no_grad()
def _losses(model: Any, batch: Batch, device: torch.device) -> list[float]:
    model = model.to(device)
    losses = torch.zeros(batch["labels"].shape[1], dtype=torch.float64)
    for document in documents_of(batch, 0):
        if not document.padding:
            logits = (
                model(input_ids=document.ids.to(device), use_cache=False)
                .logits[0]
                .float()
                .cpu()
            )
            own = F.cross_entropy(
                logits, document.labels, ignore_index=IGNORED, reduction="none"
            )
            losses[document.places] = own.double()
    model.cpu()
    return losses.tolist()


def _difference(part: Array, expected: Array, counted: Array) -> float:
    """The largest median of a part of the row, of one rank's places and losses [2 x tokens / cp]."""
    places, bits = np.split(part, 2)
    apart = np.abs(bits.view(np.float64) - expected[places])
    apart[~np.isfinite(apart)] = math.inf
    own = counted[places]
    parts = np.array_split(apart[own][np.argsort(places[own])], _PARTS)
    return float(max((np.median(each) for each in parts if each.size), default=math.inf))
