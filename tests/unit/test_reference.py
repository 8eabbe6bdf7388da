"""The file of a reference is read as it was written or refused; sums are looked up by row; losses as by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from threefold.check.compare import Bound, Comparison, compare_tensors
from threefold.config.loading import validate
from threefold.config.objective import DpoConfig
from threefold.errors import CheckpointError, ConfigError
from threefold.mesh.mesh import Mesh, init_mesh
from threefold.model import load
from threefold.model.build import build
from threefold.model.model import Model
from threefold.training.dpo_loss import pair_losses
from threefold.training.dpo_reference import Kept, Lookup, ReferenceIdentity, _read
from threefold.training.forward import token_loss_of

IDENTITY = ReferenceIdentity("rows-1", "weights-1", "float32")
VALUES = np.array([-1.5, -2.25, -0.125, -30.0])
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 37}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    Kept(IDENTITY, VALUES).keep(tmp_path / "reference")
    (path,) = (tmp_path / "reference").iterdir()
    return path


def test_a_reference_is_read_as_it_was_written(kept: Path) -> None:
    assert kept.name == "rows-1.reference"
    assert _read(kept, IDENTITY, 4).tolist() == VALUES.tolist()


def test_one_byte_changed_anywhere_is_refused(kept: Path) -> None:
    content = kept.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        kept.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"rows-1\.reference has changed\n"):
            _read(kept, IDENTITY, 4)
    for other in (
        b"",
        content[:-8],
        content + bytes(8),
        b"[]\n" + bytes(32),
        json.dumps({}).encode(),
    ):
        kept.write_bytes(other)
        with pytest.raises(CheckpointError, match=r"has changed\n  expected: .*\n  fix: rm "):
            _read(kept, IDENTITY, 4)


def test_a_reference_of_something_else_is_refused(kept: Path) -> None:
    for key in ("rows", "weights", "dtype"):
        other = ReferenceIdentity(**{**vars(IDENTITY), key: "another"})
        with pytest.raises(CheckpointError, match=f"is the reference of other {key}: "):
            _read(kept, other, 4)
        assert other.shared_name != IDENTITY.shared_name
    with pytest.raises(CheckpointError, match=r"has 4 documents, not 6\n"):
        _read(kept, IDENTITY, 6)


def test_sums_are_looked_up_by_row() -> None:
    """Rows of 2, 0 and 4 documents, of which a row that fills up a batch (-1) is none."""
    lookup = Lookup(torch.arange(1.0, 7.0).double(), torch.tensor([2, 2, 6]), num_documents=4)
    found = lookup({"indices": torch.tensor([2, 0, 1])})
    assert found.tolist() == [[3, 4, 5, 6], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert lookup({"indices": torch.tensor([-1])}).shape == (1, 4)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"beta": 0.5}, lambda c, r: math.log1p(math.exp(-0.5 * (c - r)))),
        (
            {"beta": 0.5, "label_smoothing": 0.1},
            lambda c, r: (
                0.9 * math.log1p(math.exp(-0.5 * (c - r)))
                + 0.1 * math.log1p(math.exp(0.5 * (c - r)))
            ),
        ),
        ({"loss": "hinge", "beta": 0.5}, lambda c, r: max(0.0, 1 - 0.5 * (c - r))),
        ({"loss": "ipo", "beta": 0.25}, lambda c, r: (c / 3 - r / 5 - 2) ** 2),
    ],
)
def test_losses_of_pairs(asked: dict[str, Any], expected: Any) -> None:
    for chosen, rejected in ((0.0, 0.0), (2.0, -1.0), (-3.0, 0.5), (5.0, 1.0)):
        gained = torch.tensor([[chosen, rejected, 0.0, 0.0]]).double()
        (found,) = pair_losses(
            DpoConfig(**asked), gained, torch.tensor([[3, 5, 1, 1]])
        ).tolist()
        assert found[0] == pytest.approx(expected(chosen, rejected), abs=1e-12)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = init_mesh(device="cpu")
    yield mesh
    mesh.close()


def model_of(mesh: Mesh, kind: dict[str, Any], chunk: int) -> Model:
    asked = validate(
        {"model": {"config": {**LLAMA, **kind}}, "train": {"loss_chunk_tokens": chunk}}
    )
    return build(asked, load.read_config(asked.model), mesh)


@pytest.mark.parametrize(
    "kind", [{}, {"model_type": "gemma2", "head_dim": 8}, {"model_type": "granite"}], ids=str
)
def test_log_probabilities_are_those_of_the_logits_in_any_chunks(
    mesh: Mesh, kind: dict[str, Any]
) -> None:
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(9) % 3 == 0, -100, ids.roll(-1, 1))
    gradients = []
    for chunk in (0, 4):
        model = model_of(mesh, kind, chunk)
        with model.computing({"input_ids": ids, "labels": labels}) as local:
            loss = token_loss_of(model)
            found = model.outputs(local, "log_probabilities", token_loss=loss).values
            (found * torch.arange(9)).sum().backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        )  # type: ignore[union-attr]
        expected = (
            model(input_ids=ids)
            .detach()
            .log_softmax(-1)
            .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        )
        torch.testing.assert_close(found, expected * (labels != -100), rtol=1e-5, atol=1e-5)
    whole, chunked = gradients
    bound = Bound("gradient", 1e-6, "the same sums in chunks")
    assert Comparison(compare_tensors(bound, {"": chunked}, {"": whole})).holds


def test_labels_whose_log_probabilities_a_loss_is_given_are_checked(mesh: Mesh) -> None:
    import threefold

    model = model_of(mesh, {}, 0)
    step = threefold.TrainStep(
        model,
        loss=lambda found, batch: (-found.sum(), found.numel()),
        loss_on="log_probabilities",
        lr=1e-3,
    )
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="the batch has no labels"):
        step({"input_ids": ids})
    with pytest.raises(ConfigError, match="the labels are the input_ids themselves"):
        step({"input_ids": ids, "labels": ids})
    with pytest.raises(ConfigError, match="the batch has 37 among its labels"):
        step({"input_ids": ids, "labels": ids + 37 - ids[0, 0]})
    assert (
        step({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}).loss
        > 0
    )
