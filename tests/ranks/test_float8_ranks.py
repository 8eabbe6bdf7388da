"""Weights gathered in 8 bits are those that each rank would round for itself, on every mesh; emulated on CPUs."""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.reference import compare_curves, curve_bounds, require
from ranks.spawn import run_ranks
from ranks.traffic import traffic
from threefold.model import float8
from threefold.plan import choices
from threefold.plan.decoder import decoder_of
from threefold.plan.setup import setup_of

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.examples,  # which install torchao
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None,
        reason="torchao: pip install 'threefold[torchao]'",
    ),
]

MODEL = {"config": {**LLAMA, "hidden_size": 64, "intermediate_size": 112}, "dtype": "bfloat16"}
STEPS = 4


def _run(sizes: Sizes, folder: str, asked: str, how: str = "") -> Miniature:
    """A run whose linear layers are all converted; `how` it differs from what is built."""
    import torch.distributed as dist

    choices.UNIT_BYTES, choices.KEPT_WHOLE_BYTES = 1, 0
    choices.pays = float8.pays = lambda recipe, outputs, inputs: (
        outputs % 16 == inputs % 16 == 0
    )
    float8.convert = partial(float8.convert, emulate=True)  # type: ignore[assignment]
    if how == "in bfloat16":
        float8.gather_in_8_bits = lambda *of, **how: ("", "")
    if how == "scales of shards":
        reduce = dist.all_reduce

        def own_alone(tensor: Any, op: Any = dist.ReduceOp.SUM, **settings: Any) -> Any:
            return None if op == dist.ReduceOp.MAX else reduce(tensor, op, **settings)

        dist.all_reduce = own_alone
    train = {"float8": asked, "global_batch": 8, "micro_batch": 1}
    return Miniature(sizes, folder, micro_batch=1, model=MODEL, train=train)


def _whole(run: Miniature) -> dict[str, Any]:
    named = run.model.module.named_parameters()
    return {
        name: getattr(each, "full_tensor", each.detach)().detach().clone()
        for name, each in named
    }


def _planned(run: Miniature) -> Any:
    """(calls, bytes) of a step's all-gathers over shards, as they are estimated."""
    decoder = decoder_of(run.model.architecture.to_dict())  # type: ignore[union-attr]
    found = traffic(decoder, setup_of(run.config, decoder, run.mesh.topology, None))
    return found.get(("fsdp", "all-gather"))


def _trained(sizes: Sizes, folder: str, how: str = "", asked: str = "tensorwise") -> Any:
    """(curve, weights, bytes of each all-gather of the first step, what is said, what was planned)."""
    import torch.distributed as dist

    run = _run(sizes, folder, asked, how)
    # torch 2.13 gave it another name.
    name = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )
    gather, sent = getattr(dist, name), []

    def gathered(output_tensor: Any, *args: Any, **settings: Any) -> Any:
        sent.append(output_tensor.nbytes)
        return gather(output_tensor, *args, **settings)

    setattr(dist, name, gathered)
    curve = [each[:2] for each in run.advance(1)]
    setattr(dist, name, gather)
    curve += [each[:2] for each in run.advance(STEPS - 1)]
    return curve, _whole(run), sent, dict(run.model.choices), _planned(run)


MESHES: list[Sizes] = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1)]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `_trained` gives on a mesh, once for each."""
    parent = tmp_path_factory.mktemp("meshes")
    write_corpus(parent)

    @cache
    def of(sizes: Sizes, *how: str) -> Any:
        folder = str(parent / "-".join(map(str, (*sizes, *how))))
        return run_ranks(_trained, sizes[0] * sizes[1] * sizes[2], sizes, folder, *how)[0]

    return of


@pytest.mark.parametrize("sizes", [*MESHES, (1, 1, 2, 1)], ids=str)
def test_the_same_bits_in_half_the_bytes(sizes: Sizes, curves: Any) -> None:
    """As gathered in bfloat16, and scaled by each rank; embedding, norms and head are still gathered so."""
    curve, weights, sent, said, planned = curves(sizes)
    plain, plain_weights, plain_sent, *_ = curves(sizes, "in bfloat16")
    assert curve == plain
    assert all(torch.equal(each, plain_weights[name]) for name, each in weights.items())
    assert said["float8 weights: 14 of 14 gathered in 8 bits"].startswith(
        "rounded before they are sent"
    )
    converted = {name: each for name, each in weights.items() if name.endswith("_proj.weight")}
    assert len(converted) == 14
    # Of each micro-batch a layer is gathered forward and backward.
    saved = 2 * 8 // (sizes[0] * sizes[1]) * sum(each.numel() for each in converted.values())
    assert sum(sent) == sum(plain_sent) - saved
    if sizes[2] == 1:  # where nothing else is gathered
        assert planned == (len(sent), sum(sent))


def test_as_one_process(curves: Any) -> None:
    alone, alone_weights, *_ = curves((1, 1, 1, 1))
    for sizes in MESHES:
        curve, weights, *_ = curves(sizes)
        require(
            compare_curves(
                curve, alone, curve_bounds(1e-6, 1e-6, "another order of float32 sums")
            ),
            sizes,
        )
        for name, each in weights.items():
            # A sum in another order moves an update by less than a rounding of the weight.
            bound = STEPS * torch.finfo(torch.float32).eps * each.abs().max()
            assert ((each - alone_weights[name]).abs() <= bound).all(), (sizes, name)


def test_scales_of_shards_are_seen(curves: Any) -> None:
    """Planted: each rank rounds by the largest number of its own shards."""
    curve, *_ = curves((1, 2, 1, 1), "scales of shards")
    expected, *_ = curves((1, 2, 1, 1), "in bfloat16")
    bounds = curve_bounds(1e-6, 1e-6, "another order of float32 sums")
    assert not compare_curves(curve, expected, bounds).holds


def test_rowwise_is_gathered_in_bfloat16(curves: Any) -> None:
    _, _, sent, said, planned = curves((1, 2, 1, 1), "", "rowwise")
    assert "rows and columns" in said["float8 weights: 0 of 14 gathered in 8 bits"]
    _, _, plain, *_ = curves((1, 2, 1, 1), "in bfloat16")
    assert sent == plain and planned == (len(sent), sum(sent))


def _saved(sizes: Sizes, folder: str) -> Any:
    """Two steps, a save, an evaluation in between, and two steps more; what the checkpoint's tensors are."""
    run = _run(sizes, folder, "tensorwise")
    run.advance(2)
    run.checkpointer.save(2, None, True)
    weights = _whole(run)
    with torch.no_grad():
        run.model(torch.arange(32).view(2, 16))
    plain = {
        name: type(each.to_local().detach()) for name, each in run.model.state_dict().items()
    }
    assert {*plain.values()} == {torch.Tensor}
    torch.save(run.model.state_dict(), f"{folder}/rank {run.mesh.rank}.pt")
    return weights, run.advance(2), _whole(run), run.checkpointer.saver.wait()


def _resumed(sizes: Sizes, folder: str, asked: str) -> Any:
    run = _run(sizes, folder, asked)
    assert run.done == 2
    return _whole(run), run.advance(2), _whole(run)


def test_checkpoints_hold_plain_weights(tmp_path: Path) -> None:
    """A run goes on to the same bits on its mesh; another mesh, and a run without, read the same weights."""
    write_corpus(tmp_path)
    folder = str(tmp_path / "run")
    weights, curve, trained, _ = run_ranks(_saved, 2, (1, 2, 1, 1), folder)[0]
    for sizes, asked in (
        ((1, 2, 1, 1), "tensorwise"),
        ((1, 4, 1, 1), "tensorwise"),
        ((1, 1, 1, 1), "none"),
    ):
        read, after, at_end = run_ranks(_resumed, sizes[1], sizes, folder, asked)[0]
        assert read.keys() == weights.keys()
        assert all(torch.equal(each, weights[name]) for name, each in read.items()), (
            sizes,
            asked,
        )
        if sizes == (1, 2, 1, 1):
            assert after == curve
            assert all(torch.equal(each, trained[name]) for name, each in at_end.items())
