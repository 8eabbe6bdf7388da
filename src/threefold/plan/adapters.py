"""Low-rank adapters in an estimate (`model.lora`): which projections have them; all other weights are frozen."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.config.schema import LoraConfig
from threefold.errors import ConfigError
from threefold.plan.decoder import Decoder, Layer, Weight

# Names of modules in transformers' layers, and of their weights here.
_WEIGHTS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "o_proj": "o", "dense": "o",
    "gate_proj": "gate", "up_proj": "up", "gate_up_proj": "gate up", "down_proj": "down",
    "fc1": "up", "fc2": "down", "c_fc": "up", "c_proj": "down",
}  # fmt: skip
_WHOLE, IN_PART = "adapter", "adapter whose gradient a tp rank knows in part"


def adapted(decoder: Decoder, asked: LoraConfig) -> Decoder:
    """The model with the adapters that are asked for; itself if there are none.

    Raises:
        ConfigError: it is not known which projections they are on, or what their layers keep.
    """
    if not asked.r:
        return decoder
    expected = "adapters on attention and MLP projections, whose kept tensors were compared with traced ones"
    traced = "threefold plan MODEL --mesh.dp 2 --model.lora.r N   (without --gpus: traced)"
    if any(layer.chosen for layer in decoder.layers):
        what = f"model.lora.r = {asked.r} of {decoder.model_type!r}, which has experts, cannot be estimated"
        raise ConfigError(what, expected=expected, fix=traced)
    targets = asked.target_modules
    if targets is None and not (targets := decoder.family.adapted):
        raise ConfigError(
            f"model.lora.target_modules = null for {decoder.model_type!r} cannot be estimated",
            expected="names of projections",
            fix="--model.lora.target_modules all-linear",
        )
    names = (
        set(_WEIGHTS.values())
        if targets == "all-linear"
        else {_WEIGHTS.get(each, each) for each in targets}
    )
    present = {weight.name for layer in decoder.layers for weight in layer.weights} & set(
        _WEIGHTS.values()
    )
    if targets != "all-linear" and (
        unknown := [each for each in targets if _WEIGHTS.get(each, each) not in present]
    ):
        what = f"model.lora.target_modules has {unknown[0]}, which cannot be estimated for {decoder.model_type!r}"
        possible = ", ".join(module for module, weight in _WEIGHTS.items() if weight in present)
        raise ConfigError(
            what, expected=f"of {possible}", fix="--model.lora.target_modules all-linear"
        )
    dropped = asked.dropout > 0
    layers = {
        layer: _with(layer, names, asked.r, dropped=dropped)
        for layer in dict.fromkeys(decoder.layers)
    }
    around = tuple(weight._replace(trained=False) for weight in decoder.around)
    return replace(
        decoder, layers=tuple(layers[layer] for layer in decoder.layers), around=around
    )


def _with(layer: Layer, names: set[str], rank: int, *, dropped: bool) -> Layer:
    own = [weight for weight in layer.weights if weight.name in names]
    weights = [weight._replace(trained=False) for weight in layer.weights]
    weights += [each for weight in own for each in _adapter(weight, rank)]
    return replace(
        layer,
        weights=tuple(weights),
        rank=rank,
        adapters=tuple(weight.name for weight in own),
        dropped=dropped,
    )


def _adapter(weight: Weight, rank: int) -> Iterator[Weight]:
    """A [rank, inputs] and B [outputs, rank], split as the projection is (`model.lora`)."""
    outputs, inputs = weight.shape
    yield Weight(
        IN_PART if weight.split == 0 else _WHOLE,
        (rank, inputs),
        1 if weight.split == 1 else None,
    )
    yield Weight(
        IN_PART if weight.split == 1 else _WHOLE,
        (outputs, rank),
        0 if weight.split == 0 else None,
    )
