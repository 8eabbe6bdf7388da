"""Training that goes wrong without a word elsewhere: each way has a test on real processes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, compare_curves, compare_gradients, require
from ranks.spawn import run_ranks
from threefold.check.compare import (
    ROUTERS_LOSS,
    Bound,
    compare_number,
    compare_numbers,
    compare_tensors,
    complete_gradients,
)
from threefold.check.reference import gradients_of

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _compare(tmp: str, sizes: dict[str, int], values: dict[str, Any], steps: int = 2) -> Any:
    import os

    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.verify.rank import verify_on
    from threefold.verify.verdict import VerifyOptions

    os.environ["XDG_CACHE_HOME"] = tmp
    config = validate(
        {
            **values,
            "data": {"source": f"{tmp}/corpus.txt", "seq_len": 32, **values.get("data", {})},
        }
    )
    return verify_on(init_mesh(device="cpu", **sizes), config, VerifyOptions(steps=steps))


@pytest.fixture
def folder(tmp_path: Any) -> str:
    text = "\n".join(
        " ".join(f"w{(line * 7 + word * word) % 89}" for word in range(9))
        for line in range(300)
    )
    (tmp_path / "corpus.txt").write_text(text)
    return str(tmp_path)


def _holds(
    folder: str, sizes: dict[str, int], model: dict[str, Any], steps: int = 2, **values: Any
) -> None:
    world = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    sized = model if "hidden_size" in model else {**SIZES, **model}
    settings = {"model": {"config": sized}, **values}
    settings.setdefault("train", {"global_batch": 8})
    verification = run_ranks(_compare, world, folder, sizes, settings, steps)[0]
    assert verification.holds, verification.comparison


def test_tied_embeddings_sharded_unevenly(folder: str) -> None:
    """A weight that two modules share is sharded once, and its later steps are right too (257 is odd)."""
    model = {"model_type": "llama", "tie_word_embeddings": True}
    _holds(folder, {"dp": 2, "dp_shard": 2}, model, steps=6)
    _holds(folder, {"dp": 2, "dp_shard": 2, "tp": 2}, model, steps=6)


def test_norms_of_heads_are_summed_once_over_micro_batches(folder: str) -> None:
    """q_norm and k_norm see a tp rank's own heads: one sum after the last of four micro-batches."""
    train = {"global_batch": 8, "micro_batch": 2}
    _holds(folder, {"tp": 2}, {"model_type": "qwen3"}, train=train)
    _holds(folder, {"dp": 2, "dp_shard": 2, "tp": 2}, {"model_type": "qwen3"}, train=train)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("apertus", {}),  # an activation with parameters between columns and rows
        (
            "youtu",
            {},
        ),  # attention that stays whole, so that the sequence must be whole there too
        ("dots3_note_text", {}),  # layers with heads of their own number
        ("glm4_moe", {"use_qk_norm": True}),  # norms of heads that the plan does not name
    ],
)
def test_what_a_plan_leaves_out_is_exact_under_tp(
    folder: str, kind: str, values: dict[str, bool]
) -> None:
    from architectures import config_of
    from threefold.checkpoint.manifest import architecture_of
    from threefold.model.reduced import reduced

    model = {**architecture_of(reduced(config_of(kind, **values), ranks=2)), "vocab_size": 257}
    for key in ("is_encoder_decoder", "id2label", "label2id"):
        model.pop(key, None)
    _holds(folder, {"tp": 2}, model)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_packed_documents_do_not_see_one_another(folder: str, sizes: dict[str, int]) -> None:
    """The single process runs each document alone; several rows a batch, with and without a split."""
    lines = Path(folder, "corpus.txt").read_text().splitlines()
    documents = [
        f'{{"text": "{line[: 5 + number % 23]}"}}\n' for number, line in enumerate(lines)
    ]
    Path(folder, "corpus.jsonl").write_text("".join(documents))
    data = {"source": f"{folder}/corpus.jsonl", "packing": "best_fit", "document_mask": True}
    _holds(folder, sizes, {"model_type": "mistral", "sliding_window": 7}, data=data)


def test_the_embedding_learns(folder: str) -> None:
    """An optimizer made after a forward pass would keep the unsharded embedding and never update it."""
    _holds(
        folder,
        {"dp": 2, "dp_shard": 2},
        {"model_type": "llama"},
        steps=6,
        optimizer={"lr": 0.05},
    )


def _router_losses(tmp: str, sizes: dict[str, int], micro_batch: int) -> Any:
    import torch

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.numbers import mean_aux_loss, mean_loss
    from threefold.training.step import TrainStep

    mesh = init_mesh(device="cpu", **sizes)
    router = {
        "model_type": "qwen3_moe",
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        **MOE,
    }
    config = Config.model_validate({"model": {"config": {**SIZES, **router}}})
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=0.0)
    generator = torch.Generator().manual_seed(1)
    answers = []
    for _ in range(3):
        tokens = torch.randint(257, (8, 33), generator=generator)
        whole = {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(32).expand(8, -1),
        }
        own = {name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in whole.items()}
        count = len(own["labels"])
        pieces = [
            {name: rows[start : start + micro_batch] for name, rows in own.items()}
            for start in range(0, count, micro_batch)
        ]
        result = step.run(pieces, lr=1e-2)
        answers.append(
            (mean_loss(result, mesh), mean_aux_loss(result, mesh), result.grad_norm.item())
        )
    return answers


def _router_losses_alone() -> Any:
    """transformers' own model and router loss on whole batches."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **MOE, **SIZES}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", **settings), attn_implementation="eager"
    )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    answers = []
    for _ in range(3):
        tokens = torch.randint(257, (8, 33), generator=generator)
        output = model(input_ids=tokens[:, :-1], use_cache=False)
        loss = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        (loss + 0.5 * output.aux_loss).backward()
        norm = torch.linalg.vector_norm(
            torch.stack([p.grad.norm() for p in model.parameters()])
        )
        optimizer.step()
        optimizer.zero_grad()
        answers.append((loss.item(), output.aux_loss.item(), norm.item()))
    return answers


@pytest.mark.parametrize(
    ("sizes", "micro_batch"),
    [
        ({}, 2),
        ({"dp": 2}, 4),
        ({"dp": 2, "dp_shard": 2}, 2),
        ({"cp": 2}, 8),
        ({"cp": 2, "tp": 2}, 4),
    ],
    ids=str,
)
def test_router_loss_is_that_of_the_global_batch(
    folder: str, sizes: dict[str, int], micro_batch: int
) -> None:
    world = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    found = run_ranks(_router_losses, world, folder, sizes, micro_batch)[0]
    expected = _router_losses_alone()
    require(
        compare_curves(
            [(loss, norm) for loss, _, norm in found],
            [(loss, norm) for loss, _, norm in expected],
        )
    )
    require(
        compare_numbers(
            ROUTERS_LOSS, [aux for _, aux, _ in found], [aux for _, aux, _ in expected]
        )
    )


@pytest.mark.parametrize(
    "train",
    [
        {"loss_chunk_tokens": 7},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "loss_chunk_tokens": 50, "micro_batch": 2},
    ],
    ids=str,
)
def test_what_is_computed_again_is_the_same(folder: str, train: dict[str, Any]) -> None:
    """Chunks of logits and forgotten activations, where tp sums what selective recomputation keeps."""
    sizes = {"dp": 2, "dp_shard": 2, "tp": 2}
    _holds(
        folder,
        sizes,
        {"model_type": "gemma2", "sliding_window": 7},
        train={"global_batch": 8, **train},
    )


def _split_losses() -> Any:
    """Gradients of the split loss with smoothing and z-loss, beside autograd on whole logits."""
    import torch
    import torch.distributed as dist

    from threefold.training.loss import TokenLoss

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 11, generator=generator, dtype=torch.float32) * 3
    labels = torch.tensor([0, 5, 6, -100, 10, 3])
    rank = dist.get_rank()
    start = 6 * rank
    differences = []
    for smoothing, z_loss in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.1)]:
        whole = logits.clone().requires_grad_()
        expected = TokenLoss(label_smoothing=smoothing, z_loss=z_loss)(whole, labels)
        expected[0].backward()
        part = logits[:, start : start + 6].clone().requires_grad_()
        split = TokenLoss(dist.group.WORLD, start, 11, smoothing, z_loss)
        found = split(part, labels)
        found[0].backward()
        assert whole.grad is not None and part.grad is not None
        differences += [
            compare_number(SPLIT_LOSS, found[0].item(), expected[0].item(), place="objective"),
            compare_number(
                SPLIT_LOSS, found[1].item(), expected[1].item(), place="cross entropy"
            ),
            *compare_tensors(
                SPLIT_GRADIENT, {"": part.grad}, {"": whole.grad[:, start : start + 6]}
            ),
        ]
    smoothed = torch.nn.functional.cross_entropy(
        logits, labels, label_smoothing=0.2, reduction="sum"
    )
    own = TokenLoss(label_smoothing=0.2)(logits, labels)[0]
    return [*differences, compare_number(TORCH_LOSS, own.item(), smoothed.item())]


SPLIT_LOSS = Bound("loss", 1e-5, "two partial sums in float32")
SPLIT_GRADIENT = Bound("gradient", 1e-5, "each entry is at most 1", relative=False)
TORCH_LOSS = Bound("torch's loss", 1e-6, "the same sum of six terms in float32")


def test_split_loss_with_smoothing_and_z_loss() -> None:
    for differences in run_ranks(_split_losses, 2):
        assert len(differences) == 4 * 3 + 1
        require(differences)


STRANGE = (-1, 67, 200)


def _strange_tokens() -> Any:
    """What is refused, what a step gives where values are not looked at, as on CUDA, and what a split loss gives."""
    import torch
    import torch.distributed as dist

    import threefold
    from threefold.errors import ConfigError, ThreefoldError
    from threefold.model.model import Model
    from threefold.training.loss import TokenLoss

    mesh = threefold.init_mesh(tp=2)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step = threefold.TrainStep(model, lr=0.0)
    refused, losses, split = [], [], []
    look = Model.refuse_strange
    for token in STRANGE:
        ids = torch.arange(8).reshape(2, 4)
        other = ids.clone()
        other[1, 2] = token
        for call in (model, partial(model.generate, max_new_tokens=1)):
            with pytest.raises(ConfigError) as error:
                call(other)
            refused.append(str(error.value).splitlines()[0])
            # What one rank alone refuses, the other one does not wait for.
            with pytest.raises(ThreefoldError, match=f"{token} among"):
                call(other if mesh.rank else ids)
        Model.refuse_strange = lambda *_, **__: None  # type: ignore[method-assign]
        for rows in ({"input_ids": other, "labels": ids}, {"input_ids": ids, "labels": other}):
            losses.append(step(rows).loss)
        Model.refuse_strange = look  # type: ignore[method-assign]
        start = 34 * dist.get_rank()
        loss = TokenLoss(dist.group.WORLD, start, 67)
        found = loss(torch.zeros(2, 34 - start // 34), torch.tensor([3, token]))
        split.append(found[1].item())
    mesh.close()
    return refused, losses, split


def test_no_token_that_the_vocabulary_lacks_is_computed_with_in_silence() -> None:
    for refused, losses, split in run_ranks(_strange_tokens, 2):
        assert refused == [
            f"the batch has {token} among its input_ids" for token in STRANGE for _ in range(2)
        ]
        assert len(losses) == 6 and all(map(math.isnan, losses))
        assert len(split) == 3 and all(map(math.isnan, split))


ROUTED = ("mixtral", "olmoe", "minimax", "ernie4_5_moe", "jetmoe", "dbrx")
PADDED_FROM = (32, 9, 20, 13, 32, 5, 27, 18)


def _padded_rows() -> Any:
    import torch

    tokens = torch.randint(3, 131, (8, 33), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(32)[None] >= torch.tensor(PADDED_FROM)[:, None]
    rows = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(32).expand(8, -1),
    }
    rows["labels"] = rows["labels"].masked_fill(padding, -100)
    return {name: values.clone() for name, values in rows.items()}, padding


def _routed_config(kind: str) -> Any:
    from architectures import config_of
    from threefold.model.reduced import reduced

    config = reduced(config_of(kind))
    config.output_router_logits = True
    return config


def _padded_router_loss(tmp: str, sizes: dict[str, int], kind: str, micro_batch: int) -> Any:

    from threefold.checkpoint.manifest import architecture_of
    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.batches import micro_batches
    from threefold.training.numbers import mean_aux_loss
    from threefold.training.step import TrainStep

    mesh = init_mesh(device="cpu", **sizes)
    config = Config.model_validate(
        {"model": {"config": architecture_of(_routed_config(kind))}, "data": {"seq_len": 32}}
    )
    model = build(config, load.read_config(config.model), mesh)
    gradients: dict[str, Any] = {}

    def observe() -> None:
        gradients.update(
            (name, gradient.clone()) for name, gradient in complete_gradients(model)
        )

    step = TrainStep(
        model, build_optimizer(model.module, config.optimizer), grad_clip=0.0, observe=observe
    )
    rows, padding = _padded_rows()
    own = {
        name: values[mesh.dp_rank :: mesh.dp_size]
        for name, values in {**rows, "padding": padding}.items()
    }
    result = step.run(micro_batches(own, micro_batch), lr=0.0)
    return mean_aux_loss(result, mesh), {
        name: values.numpy() for name, values in gradients.items()
    }


@pytest.mark.parametrize(
    ("kind", "sizes", "micro_batch"),
    [
        ("mixtral", {}, 8),
        ("mixtral", {"dp": 2}, 2),
        ("mixtral", {"cp": 2}, 8),
        *((kind, {}, 2) for kind in ROUTED),
    ],
    ids=str,
)
def test_router_loss_leaves_padding_out(
    folder: str, kind: str, sizes: dict[str, int], micro_batch: int
) -> None:
    """As transformers does with an attention mask: in value, and in every gradient."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_routed_config(kind), attn_implementation="eager")
    rows, padding = _padded_rows()
    output = model(
        input_ids=rows["input_ids"],
        attention_mask=(~padding).long(),
        use_cache=False,
        output_router_logits=True,
    )
    loss = torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), rows["labels"].flatten()
    )
    coefficient = next(
        getattr(model, name)
        for name in ("router_aux_loss_coef", "aux_loss_coef")
        if hasattr(model, name)
    )
    (loss + coefficient * output.aux_loss).backward()
    aux, gradients = run_ranks(
        _padded_router_loss,
        sizes.get("dp", 1) * sizes.get("cp", 1),
        folder,
        sizes,
        kind,
        micro_batch,
    )[0]
    assert aux == pytest.approx(output.aux_loss.item(), abs=1e-5)
    require(compare_gradients(gradients, gradients_of(model)))


def _noise(sequence_parallel: bool) -> Any:
    """(what attention drops on this rank, whether a layer that is computed again drops the same, the numbers after)."""
    import torch

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load, noise
    from threefold.model.build import build

    mesh = init_mesh(device="cpu", tp=2)
    config = Config.model_validate(
        {
            "model": {"config": {**SIZES, "model_type": "llama", "attention_dropout": 0.5}},
            "data": {"seq_len": 32},
            "mesh": {"sequence_parallel": sequence_parallel},
        }
    )
    model = build(config, load.read_config(config.model), mesh)
    torch.manual_seed(hash(noise.places(mesh, model.tensor.sequence_group)))
    module = model.module.model.layers[0].self_attn.train()
    states = torch.ones(1, 2, 8, 8)
    rows = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
    with model.context.batch({**rows, "position_ids": torch.arange(8)[None]}):
        before = torch.get_rng_state()
        first, _ = model.context._attention(
            module, states, states, states, None, dropout=0.5, is_causal=True
        )
        after = torch.rand(4)
        torch.set_rng_state(before)
        again, _ = model.context._attention(
            module, states, states, states, None, dropout=0.5, is_causal=True
        )
    return first.tolist(), torch.equal(first, again), after.tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_ranks_drop_their_own_heads_and_the_same_activations(
    sequence_parallel: bool,
) -> None:
    (first, same_0, after_0), (second, same_1, after_1) = run_ranks(
        _noise, 2, sequence_parallel
    )
    assert first != second  # other heads, other noise
    assert same_0 and same_1
    assert (after_0 != after_1) == sequence_parallel  # other tokens, or the same activations


def test_a_mask_that_shows_nothing_and_is_for_no_layer_is_split_over_cp(folder: str) -> None:
    """qwen2_moe without sliding layers asks for the mask of a window of 0 tokens besides."""
    model = {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 32}
    _holds(folder, {"cp": 2}, model, mesh={"cp_method": "gather"})
