"""Modules of one's own on data ranks: the same numbers and gradients as in one process, whatever they hold."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks.loops import whole
from ranks.reference import STRICT, require
from ranks.spawn import run_ranks
from threefold.check.compare import compare_tensors
from threefold.errors import ConfigError

pytestmark = pytest.mark.ranks

MESHES: list[dict[str, int]] = [{"dp": 2}, {"dp": 2, "dp_shard": 2}, {"dp": 4, "dp_shard": 2}]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks, a buffer, a parameter that nothing uses, and one that only some rows use."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 5)
        self.rare = nn.Linear(width, 5)
        # Of a layout that neither shards nor what a checkpoint is read into can have.
        self.unused = nn.Parameter(torch.ones(7, 2).t())
        self.register_buffer("scale", torch.full((1,), 0.5).expand(width))

    def forward(self, pixels: Any, rare: Any = None) -> dict[str, Any]:
        x = pixels * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        # Only where a rank has such rows: its other ranks have no gradient of it.
        return {
            "logits": logits + self.rare(x) if rare is not None and bool(rare.any()) else logits
        }


def loss(outputs: Any, batch: Any) -> tuple[Any, Any]:
    losses = nn.functional.cross_entropy(
        outputs["logits"].float(), batch["labels"], reduction="none"
    )
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def batch_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    rows = {
        "pixels": torch.randn(8, 12, generator=generator),
        "labels": torch.randint(5, (8,), generator=generator),
    }
    return {**rows, "weights": torch.rand(8, generator=generator)}


def _train(sizes: dict[str, int], folder: str) -> Any:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    torch.manual_seed(mesh.rank)  # rank 0's values are those of all
    model = threefold.load_model(Net(), mesh=mesh)
    first: dict[str, Any] = {}

    def observe() -> None:
        if not first:
            first.update(
                {
                    n: whole(p.grad).numpy()
                    for n, p in model.named_parameters()
                    if p.grad is not None
                }
            )

    # Groups of one's own keep their rates, and a scheduler of torch sets them.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "lr": 1e-2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = threefold.TrainStep(model, optimizer, loss=loss, micro_batch=3, observe=observe)
    found = threefold.load(folder, model=model, optimizer=step)
    numbers = []
    for number in range(found.step if found else 0, 4):
        own = {
            name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in batch_of(number).items()
        }
        if mesh.dp_size <= 2 and sizes.get("dp_shard", 1) == 1:
            own["rare"] = torch.full((len(own["labels"]),), mesh.dp_rank == 0)
            if not sizes:
                own["rare"] = torch.ones(8, dtype=torch.bool)
        numbers.append(tuple(step(own)))
        scheduler.step()
        if number == 1:
            threefold.save(
                folder,
                model=model,
                optimizer=optimizer,
                step=2,
                extra={"rates": scheduler.state_dict()},
            )
    rates = [group["lr"] for group in optimizer.param_groups]
    evaluated = threefold.EvalStep(model, loss=loss)([own])
    mesh.close()
    return numbers, first, rates, tuple(evaluated)


def _plainly(step: int = 0) -> Any:
    torch.manual_seed(0)
    net = Net()
    batch = batch_of(step)
    total, count = loss(net(batch["pixels"]), batch)
    (total / count).backward()
    return (total / count).item(), {
        n: p.grad for n, p in net.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_a_module_follows_one_process_and_goes_on_on_another_mesh(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    ranks = run_ranks(_train, sizes["dp"], sizes, str(tmp_path))
    value, gradients = _plainly()
    assert ranks[0][0][0][0] == pytest.approx(value, abs=1e-6)
    require(compare_tensors(STRICT, ranks[0][1], gradients))
    assert all(rank[0] == ranks[0][0] and rank[3] == ranks[0][3] for rank in ranks)
    resumed = run_ranks(_train, 2, {"dp": 2, "dp_shard": 2}, str(tmp_path))[0]
    for a, b in zip(resumed[0], ranks[0][0][2:], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert ranks[0][2] == pytest.approx([1e-2 / 16, 1e-3 / 16])


def _in_pieces(sizes: dict[str, int], folder: str) -> Any:
    """Gradients averaged a few at a time, as those of large modules are."""
    from threefold.training import gradients

    gradients._TOGETHER_BYTES = 64
    return _train(sizes, folder)


def test_what_only_one_rank_uses_has_its_gradient_on_all(tmp_path: Path) -> None:
    ranks = run_ranks(_train, 2, {"dp": 2}, str(tmp_path / "together"))
    assert "rare.weight" in ranks[0][1] and "unused" not in ranks[0][1]
    assert ranks[0][0] == ranks[1][0]
    assert run_ranks(_in_pieces, 2, {"dp": 2}, str(tmp_path / "pieces"))[0][0] == ranks[0][0]


def _transformers(sizes: dict[str, int], folder: str) -> Any:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        T5Config,
        T5ForConditionalGeneration,
    )

    import threefold

    mesh = threefold.init_mesh(**sizes)
    found = []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        sizes_of_bert = {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        sizes_of_bert |= {
            "intermediate_size": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        sizes_of_t5 = {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
        }
        t5 = T5Config(**sizes_of_t5, dropout_rate=0.0, decoder_start_token_id=0)
        classifier = BertForSequenceClassification(BertConfig(**sizes_of_bert))
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(64, (8, 10), generator=generator)
        for module, labels in (
            (classifier, ids[:, 0] % 2),
            (T5ForConditionalGeneration(t5), ids),
        ):
            model = threefold.load_model(module, mesh=mesh, dtype=dtype)
            batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

            def own(outputs: Any, batch: Any) -> tuple[Any, Any]:
                logits = outputs.logits.flatten(0, -2).float()
                losses = nn.functional.cross_entropy(
                    logits, batch["labels"].flatten(), reduction="sum"
                )
                return losses, batch["labels"].numel()

            step = threefold.TrainStep(model, loss=own, lr=1e-2)
            rows = {
                name: values[mesh.dp_rank :: mesh.dp_size] for name, values in batch.items()
            }
            found.append((dtype, [tuple(step(rows)) for _ in range(3)]))
            to = Path(folder) / f"{dtype}-{len(found)}"
            assert model.save_pretrained(to).verified == "reloaded: equal weights"
            with pytest.raises(ConfigError, match="is not empty"):
                model.save_pretrained(to)
    mesh.close()
    return found


def test_a_classifier_and_t5_follow_one_process(tmp_path: Path) -> None:
    alone = run_ranks(_transformers, 1, {}, str(tmp_path))[0]
    for sizes in MESHES[:2]:
        ranks = run_ranks(_transformers, 2, sizes, str(tmp_path / str(len(sizes))))
        for (dtype, found), (_, expected) in zip(ranks[0], alone, strict=True):
            bound = 1e-4 if dtype == "float32" else 3e-2
            assert all(
                a == pytest.approx(b, rel=bound) for a, b in zip(found, expected, strict=True)
            ), (sizes, dtype)


def _refused(sizes: dict[str, int], folder: str) -> list[str]:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    said = []

    def tell(do: Any) -> None:
        try:
            do()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    tell(
        lambda: threefold.load_model(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), mesh=mesh
        )
    )
    tell(lambda: threefold.load_model(nn.Linear(2, 2 + mesh.rank), mesh=mesh))
    model = threefold.load_model(Net(), mesh=mesh)
    model.module.scale += mesh.rank
    tell(lambda: threefold.save(folder, model=model, step=1))
    model.module.scale -= mesh.rank
    tell(lambda: threefold.save(folder, model=model, step=1, extra={"rank": mesh.rank}))
    tell(lambda: threefold.EvalStep(model, loss=loss)([batch_of(0)] if mesh.rank else []))
    mesh.close()
    return said


def test_what_would_differ_between_data_ranks_is_refused(tmp_path: Path) -> None:
    ranks = run_ranks(_refused, 2, {"dp": 2}, str(tmp_path))
    for norm, other, buffer, extra, _ in ranks:
        assert norm.startswith(
            "ConfigError: BatchNorm1d '1' mixes the rows of a rank, and each of 2 dp ranks has its own"
        )
        assert other.startswith(
            "ConfigError: rank 1 gives load_model another Linear than rank 0"
        )
        assert buffer.startswith(
            "RunError: the copies of scale differ after step 1, which is not saved: rank 1 from rank 0"
        )
        assert "dist.all_reduce(module.scale" in buffer
        assert extra.startswith("ConfigError: ranks 0 and 1 save different values as extra")
    assert not (tmp_path / "checkpoints").exists()


def _hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def _scaled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    return module


def _empty() -> nn.Module:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(0, 3))
    return module


def _refused_parameters(sizes: dict[str, int]) -> list[str]:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    said = []
    for module in (
        nn.Embedding(5, 4, max_norm=1.0),
        nn.Embedding(5, 4, scale_grad_by_freq=True),
        _hooked(),
        _scaled(),
        _empty(),
    ):
        try:
            threefold.load_model(module, mesh=mesh)
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("")
    mesh.close()
    return said


@pytest.mark.parametrize("shards", [1, 2])
def test_parameters_that_ranks_would_change_or_lose_are_refused(shards: int) -> None:
    for norm, counting, hook, scale, empty in run_ranks(
        _refused_parameters, 2, {"dp": 2, "dp_shard": shards}
    ):
        for said in (norm, counting):
            assert said.startswith("Embedding '' mixes the rows of a rank")
        assert hook == (
            "the parameter weight has hooks on its gradient\n"
            "  expected: none: they would get parts of it on a mesh or in micro-batches, and nothing with shards\n"
            "  fix: optimizer.register_step_pre_hook(hook), where parameter.grad is complete"
        )
        assert scale == (
            "the parameter scale is of shape [], and is to be sharded\n"
            "  expected: a dimension, to be split over the ranks\n"
            "  fix: nn.Parameter(torch.ones(1)), or threefold.init_mesh(dp_shard=1)"
        ) * (shards - 1)
        assert empty == scale.replace("[]", "[0, 3]")


def _after_a_call(sizes: dict[str, int]) -> list[float]:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    torch.manual_seed(0)
    model = threefold.load_model(Net(), mesh=mesh)
    numbers: list[float] = []
    with torch.no_grad():
        model.module(batch_of(0)["pixels"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = threefold.TrainStep(model, optimizer, loss=loss)
    for _ in range(3):
        numbers += step(batch_of(0))
        with torch.no_grad():
            model.module(batch_of(0)["pixels"])
    mesh.close()
    return numbers


def test_optimizer_that_is_made_after_a_call_of_the_module_trains_its_shards() -> None:
    whole, shards = (
        run_ranks(_after_a_call, 2, {"dp": 2, "dp_shard": each})[0] for each in (1, 2)
    )
    assert shards == pytest.approx(whole, rel=1e-5)


def _past_the_shards(sizes: dict[str, int]) -> list[str]:
    """What a step says of a gradient that FSDP2 would not see, or that nobody would change."""
    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(Net(), mesh=mesh)
    said = []

    def penalised(outputs: Any, batch: Any, *, whole: bool = True) -> Any:
        total, count = loss(outputs, batch)
        weight: Any = dict(model.named_parameters())["head.weight"]
        weight = weight.full_tensor() if whole and hasattr(weight, "full_tensor") else weight
        return total + count * weight.square().sum(), count

    for own in (penalised, partial(penalised, whole=False), loss):
        if own is loss:
            model.module.head.weight.register_hook(lambda gradient: 2 * gradient)
        try:
            threefold.TrainStep(model, loss=own)(batch_of(0))
        except ConfigError as error:
            said.append(str(error).splitlines()[0])
        else:
            said.append("")
    mesh.close()
    return said


def test_gradient_that_goes_past_the_shards_is_refused() -> None:
    copies, shards = (
        run_ranks(_past_the_shards, 2, {"dp": 2, "dp_shard": each}) for each in (1, 2)
    )
    hooked = "the parameter head.weight has hooks on its gradient"
    assert copies == 2 * [["", "", hooked]]
    assert shards == 2 * [
        [
            "the loss reads parameters of the model itself, of which each rank holds shards",
            "the loss gave a DTensor, whose parts are on other ranks too, as its sum",
            hooked,
        ]
    ]


def _split(sizes: dict[str, int]) -> str:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    try:
        threefold.load_model(Net(), mesh=mesh)
    except ConfigError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_axes_that_a_module_cannot_have_are_refused_by_name(axis: str) -> None:
    assert run_ranks(_split, 2, {axis: 2}) == 2 * [
        f"mesh.{axis} = 2, but a Net is a custom module\n"
        "  expected: data ranks only: how to split its layers or its rows is not known\n"
        f"  fix: threefold.init_mesh(dp=2, {axis}=1)   (dp_shard=2 shards its parameters)"
    ]


def _sums(sizes: dict[str, int]) -> list[float]:
    import torch.distributed as dist

    import threefold

    mesh = threefold.init_mesh(**sizes)
    found = []
    for name in ("dp", "cp", "tp", "loss"):
        value = torch.tensor([float(mesh.rank)])
        axis = mesh.device_mesh(name)
        assert (axis is None) == (mesh.size(name) == 1)
        if axis is not None:
            assert axis.mesh_dim_names == (name,) and axis.size() == mesh.size(name)
            dist.all_reduce(value, group=axis.get_group())
        found.append(value.item())
    with pytest.raises(ConfigError, match=r"mesh.device_mesh\('data'\): no such axis"):
        mesh.device_mesh("data")
    mesh.close()
    return found


def test_collectives_of_ones_own_along_an_axis() -> None:
    assert run_ranks(_sums, 4, {"dp": 2, "tp": 2}) == [
        [2, 0, 1, 2],
        [4, 1, 1, 4],
        [2, 2, 5, 2],
        [4, 3, 5, 4],
    ]
    assert math.isclose(run_ranks(_sums, 1, {})[0][0], 0.0)


def _negatives(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Those of the same batch: a sum over rows in form alone."""
    rows = nn.functional.normalize(outputs["logits"], dim=-1)
    losses = nn.functional.cross_entropy(
        rows @ rows.T, torch.arange(len(rows)), reduction="none"
    )
    return losses.sum(), len(rows)


def _balanced(outputs: Any, batch: Any) -> tuple[Any, Any]:
    losses = nn.functional.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    return losses.square().sum() / losses.mean(), len(losses)


def _dropped(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Draws at random, and writes in what it is given a copy of."""
    kept = nn.functional.dropout(outputs["logits"], 0.5)
    kept[:, 0] = 0.0
    return nn.functional.cross_entropy(kept, batch["labels"], reduction="sum"), len(kept)


def _gathered(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """With the negatives of all ranks: the same on any mesh."""
    rows = everyone = outputs["logits"]
    if torch.distributed.is_initialized():
        everyone = torch.cat(torch.distributed.nn.functional.all_gather(rows))
    return (rows @ everyone.detach().T).logsumexp(1).sum(), len(rows)


class _Scaled(torch.autograd.Function):
    """As fused losses do it, it writes in what it has saved: twice would be another gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Any) -> Any:
        ctx.gradient = torch.ones_like(rows)
        return rows.sum()

    @staticmethod
    def backward(ctx: Any, given: Any) -> Any:  # type: ignore[override]
        ctx.gradient *= given
        return ctx.gradient


class _Once:
    """A loss that counts its calls, and can be differentiated once."""

    calls = 0

    def __call__(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        self.calls += 1
        total = 3 * _Scaled.apply(outputs["logits"].square())
        return total, len(outputs["logits"])


def _mean(outputs: Any, batch: Any) -> tuple[Any, Any]:
    return nn.functional.cross_entropy(outputs["logits"], batch["labels"]), 1


def _mean_of_tensors(outputs: Any, batch: Any) -> tuple[Any, Any]:
    return _mean(outputs, batch)[0], torch.ones(())


def _rare(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Of the parts of a batch, one has a single term, others another number."""
    counted = batch["weights"] >= 3
    return outputs["logits"].sum(1)[counted].sum(), int(counted.sum())


class _Pairs:
    """Margins of consecutive rows."""

    def __init__(self, together: int) -> None:
        self.rows_together = together

    def __call__(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        chosen, rejected = outputs["logits"][::2, 0], outputs["logits"][1::2, 0]
        return -nn.functional.logsigmoid(chosen - rejected).sum(), len(chosen)


def _mixing(sizes: dict[str, int], micro_batch: int | None) -> list[str]:
    """What refused the first step with each loss; none of these changed a weight."""
    import threefold

    said = []
    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(Net(), mesh=mesh)
    right = (loss, _dropped, _Pairs(2), _gathered, _rare, once := _Once())
    mixing = (_negatives, _balanced, _Pairs(1), _Pairs(3), _mean, _mean_of_tensors)
    for own in right + mixing:
        step = threefold.TrainStep(model, loss=own, lr=1e-3, micro_batch=micro_batch)
        before = whole(model.module.head.weight)
        generator = torch.Generator().manual_seed(mesh.dp_rank)
        pixels, weights = (
            torch.randn(4, 12, generator=generator),
            torch.arange(4) + mesh.dp_rank,
        )
        try:
            step(given := {"pixels": pixels, "labels": torch.arange(4), "weights": weights})
            said.append("")
        except ConfigError as error:
            said.append(str(error).splitlines()[0].partition(":")[0])
        assert torch.equal(before, whole(model.module.head.weight)) is bool(said[-1])
    assert once.calls == 4 // (micro_batch or 4)
    step = threefold.TrainStep(model, loss=once, lr=0.0, micro_batch=micro_batch)
    batch = {"pixels": torch.ones(4, 12)}
    assert step(batch)[1] == step(batch)[1] == step(batch)[1], (
        "looked at in the first one alone"
    )
    for own in (loss, _rare, _mean, _mean_of_tensors):
        try:
            threefold.EvalStep(model, loss=own)(
                {name: each[part] for name, each in given.items()}
                for part in (slice(2), slice(2, 3), slice(3, 4))
            )
            said.append("")
        except ConfigError as error:
            said.append(str(error).splitlines()[0])
    mesh.close()
    return said


def test_a_loss_that_mixes_rows_is_refused_where_they_are_split() -> None:
    """By ranks or by micro-batches. In one process they are all together; so are rows that belong together."""
    mean = "the loss gave 1 as its count for each of"
    evaluated = ["", "", *2 * [f"{mean} 3 micro-batches, with 4 rows in all"]]
    assert run_ranks(_mixing, 1, {}, None) == [[*12 * [""], *evaluated]]
    found = [*6 * [""], *4 * ["the loss mixes rows"]]
    of_step = f"{mean} 2 micro-batches, with 4 rows in all"
    assert run_ranks(_mixing, 1, {}, 2) == [[*found, of_step, of_step, *evaluated]]
    of_step = f"{mean} 2 micro-batches, with 8 rows in all"
    evaluated[2:] = 2 * [f"{mean} 6 micro-batches, with 8 rows in all"]
    split = [*found, of_step, of_step, *evaluated]
    for shards in (1, 2):
        assert run_ranks(_mixing, 2, {"dp": 2, "dp_shard": shards}, None) == 2 * [split]


def _later_pairs(sizes: dict[str, int], micro_batch: int | None) -> list[str]:
    """What refused steps with 4 rows, 3 and again 4."""
    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(Net(), mesh=mesh)
    step = threefold.TrainStep(model, loss=_Pairs(2), micro_batch=micro_batch)
    said = []
    for rows in (4, 3, 4):
        try:
            step({"pixels": torch.ones(rows, 12)})
            said.append("")
        except ConfigError as error:
            said.append(str(error).partition(":")[0])
    mesh.close()
    return said


def test_pair_that_a_later_batch_splits_is_refused() -> None:
    found = ["", "the loss mixes rows", ""]
    assert run_ranks(_later_pairs, 1, {}, 2) == [found]
    assert run_ranks(_later_pairs, 2, {"dp": 2}, None) == 2 * [found]
