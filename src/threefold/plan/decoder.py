"""A causal model as its config.json describes it: the parameters of each layer, and its work per token.

Without torch and without transformers: a family's rules are a row of `families`, sizes are the config's. A model that
this cannot describe exactly is refused by name.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from threefold.errors import ConfigError, Problem
from threefold.jsonl import Values
from threefold.plan.families import FAMILIES, Family, Key
from threefold.plan.operations import Attention, Flops, longest_row

TRACED = (
    "threefold plan MODEL --mesh.dp 2   (without --gpus: the model's own "
    "code, traced on a mesh that the keys name)"
)
_UNKNOWN = ("qk_layernorm", "use_parallel_residual", "clip_qkv", "num_nextn_predict_layers")
# In one kernel each, which keeps its input.
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
_EXPERTS = ("num_experts", "num_local_experts")


class Weight(NamedTuple):
    """A parameter.

    Attributes:
        split: the dim that tp ranks share; None: each has all of it.
        met: the share of it that a token meets: of experts, the chosen ones.
        trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    met: float = 1.0
    trained: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local(self, tp: int) -> tuple[int, ...]:
        """Its shape on a tp rank that has the largest part."""
        return tuple(
            -(-size // tp) if dim == self.split else size for dim, size in enumerate(self.shape)
        )


@dataclass(frozen=True)
class Layer:
    """A layer; equal ones are one object.

    Attributes:
        window: most keys that a token sees; None: all before it.
        width: of the MLP, or of an expert.
        chosen: experts of a token; 0: there are none.
        experts: how many a layer has.
        shared_width: of the expert that all tokens meet.
        rank, adapters, dropped: of low-rank adapters, the weights that have one, and whether their inputs are dropped;
            with a rank above 0, all else is frozen.
    """

    weights: tuple[Weight, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    width: int
    chosen: int = 0
    experts: int = 0
    shared_width: int = 0
    rank: int = 0
    adapters: tuple[str, ...] = ()
    dropped: bool = False

    @cached_property
    def size(self) -> int:
        """Parameters."""
        return sum(each.size for each in self.weights)

    def has_adapter(self, *names: str) -> bool:
        """Whether any of these weights has one."""
        return not set(names).isdisjoint(self.adapters)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model; itself alone is equal to it.

    Attributes:
        around: the parameters outside the layers, the head too unless it is `tied` to the embedding.
        positions: the longest row that it takes; None: unknown.
        unsure: why it is not known what its layers keep for their backward; empty if it is.
    """

    model_type: str
    family: Family
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    around: tuple[Weight, ...]
    tied: bool
    positions: int | None
    unsure: tuple[Problem, ...] = ()

    @cached_property
    def size(self) -> int:
        """Parameters."""
        return sum(layer.size for layer in self.layers) + sum(each.size for each in self.around)

    @cached_property
    def flops(self) -> Flops:
        """Operations that a token meets: of matrices the head, also where it is tied, and no embedding."""
        parameters = {True: 0.0, False: 0.0}
        for weight in (
            weight for layer in self.layers for weight in layer.weights if len(weight.shape) > 1
        ):
            parameters[weight.trained] += weight.size * weight.met
        parameters[self.around[0].trained] += self.vocabulary * self.hidden
        attention = Counter(
            Attention(each.heads, each.head_dim, each.head_dim, each.window)
            for each in self.layers
        )
        return Flops(parameters[True], parameters[False], attention)

    @property
    def heads(self) -> tuple[int, int]:
        """The numbers of heads of queries, and of keys and values."""
        return self.layers[0].heads, self.layers[0].kv_heads


def decoder_of(values: Values) -> Decoder:
    """From a config.json's object, or from a config's `to_dict()`.

    Raises:
        ConfigError: a family that is not known, or sizes that are missing.
    """
    family = _family(values)
    sizes = _Sizes(values, family)
    hidden = sizes.number("hidden_size")
    vocabulary = sizes.number("vocab_size")
    depth = sizes.number("num_hidden_layers")
    distinct: dict[Layer, Layer] = {}
    layers = tuple(
        distinct.setdefault(each, each)
        for each in (_layer(sizes, place) for place in range(depth))
    )
    tied = bool(values.get("tie_word_embeddings", family.tied))
    around = [Weight("embedding", (vocabulary, hidden), 0), *_norm("norm", hidden, family.norm)]
    if not tied:
        around.append(Weight("head", (vocabulary, hidden), 0))
    if sizes.says(family.head_bias):
        around.append(Weight("head bias", (vocabulary,), 0))
    return Decoder(
        str(values["model_type"]), family, hidden, vocabulary, layers, tuple(around), tied,
        longest_row(values), tuple(_kept_problems(family, values)),
    )  # fmt: skip


def _family(values: Values) -> Family:
    model_type = values.get("model_type")
    if quantised := values.get("quantization_config"):
        raise ConfigError(
            f"quantization_config = {quantised} of {model_type!r} cannot be estimated",
            expected="floating-point weights: codes and scales cannot be trained",
            fix="the config.json of the unquantised model",
        )
    if (family := FAMILIES.get(str(model_type))) is None:
        parts = " (its decoder is one of several parts)" if "text_config" in values else ""
        raise ConfigError(
            f"model_type {model_type!r} cannot be estimated{parts}",
            expected=f"a model type whose layers are known: {', '.join(FAMILIES)}",
            fix=TRACED,
        )
    for key in _UNKNOWN:
        if values.get(key):
            raise ConfigError(
                f"{key} = {values[key]} of {model_type!r} cannot be estimated",
                expected="layers as the family's published models have them: others have more parameters, or keep more",
                fix=TRACED,
            )
    return family


def _kept_problems(family: Family, values: Values) -> list[Problem]:
    reasons, expected = [], "layers whose kept tensors were compared with traced ones"
    if family.written_out:
        reasons.append(
            f"the attention of {values['model_type']!r}, which is computed operator by operator"
        )
    if values.get("attention_dropout"):
        reasons.append(
            f"attention_dropout = {values['attention_dropout']}, for which kernels differ"
        )
    activation = values.get("hidden_act") or values.get("hidden_activation") or "silu"
    if activation not in _ACTIVATIONS:
        reasons.append(f"hidden_act = {activation}, which is computed operator by operator")
    return [Problem(f"{what}, cannot be estimated", expected, TRACED) for what in reasons]


class _Sizes:
    """The config's values, with the family's where the config has none."""

    def __init__(self, values: Values, family: Family) -> None:
        self.values, self.family = values, family

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"the config of a {self.values['model_type']!r} has {key} = {value!r}",
                expected="a number above 0: transformers' own default is not known here",
                fix=f'"{key}": N in the config.json',
            )
        return value

    def says(self, key: Key | bool) -> bool:
        return key if isinstance(key, bool) else bool(self.values.get(key.name, key.default))

    @property
    def kv_heads(self) -> int:
        own = self.values.get("num_key_value_heads") or self.family.kv_heads
        return int(own) if own else self.number("num_attention_heads")

    @property
    def head_dim(self) -> int:
        own = self.values.get("head_dim") or self.family.head_dim
        return (
            int(own)
            if own
            else self.number("hidden_size") // self.number("num_attention_heads")
        )


def _layer(sizes: _Sizes, place: int) -> Layer:
    family = sizes.family
    hidden = sizes.number("hidden_size")
    heads = sizes.number("num_attention_heads")
    kv_heads = sizes.kv_heads
    head_dim = sizes.head_dim
    weights = [*_attention(sizes, hidden, heads * head_dim, kv_heads * head_dim)]
    for number in range(family.num_norms):
        weights += _norm(f"norm {number}", hidden, family.norm)
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "window": _window(sizes, place),
    }
    if not _is_sparse(sizes, place):
        width = sizes.number("intermediate_size")
        return Layer((*weights, *_mlp(sizes, hidden, width)), width=width, **shape)
    # transformers has two names for their number.
    experts = sizes.number(
        next((key for key in _EXPERTS if sizes.values.get(key)), family.experts)
    )
    chosen = sizes.number("num_experts_per_tok")
    width = sizes.number(family.expert_width)
    shared = int(sizes.values.get("shared_expert_intermediate_size") or 0)
    weights += _experts(sizes, hidden, width, experts, chosen / experts)
    if shared:
        weights += _mlp(sizes, hidden, shared, name="shared ")
        weights.append(Weight("shared gate", (1, hidden)))
    return Layer(
        tuple(weights),
        width=width,
        chosen=chosen,
        experts=experts,
        shared_width=shared,
        **shape,
    )


def _attention(sizes: _Sizes, hidden: int, queries: int, keys: int) -> Sequence[Weight]:
    family, bias = sizes.family, sizes.says(sizes.family.qkv_bias)
    parts = (
        {"qkv": queries + 2 * keys}
        if family.fused_qkv
        else {"q": queries, "k": keys, "v": keys}
    )
    weights = [Weight(name, (width, hidden), 0) for name, width in parts.items()]
    weights += [Weight(f"{name} bias", (width,), 0) for name, width in parts.items() if bias]
    weights.append(Weight("o", (hidden, queries), 1))
    if sizes.says(family.o_bias):
        weights.append(Weight("o bias", (hidden,)))
    head_dim = sizes.head_dim
    wide = (
        sizes.says(Key("use_qk_norm", False))
        if family.qk_norm == "each"
        else bool(family.qk_norm)
    )
    if wide and family.qk_norm == "head":
        weights += [Weight("q norm", (head_dim,)), Weight("k norm", (head_dim,))]
    elif wide and family.qk_norm == "all":
        weights += [Weight("q norm", (queries,)), Weight("k norm", (keys,))]
    elif wide:
        weights += [
            Weight("q norm", (queries // head_dim, head_dim)),
            Weight("k norm", (keys // head_dim, head_dim)),
        ]
    if family.sinks:
        weights.append(Weight("sinks", (queries // head_dim,), 0))
    return weights


def _mlp(sizes: _Sizes, hidden: int, width: int, *, name: str = "") -> Sequence[Weight]:
    bias = sizes.says(sizes.family.mlp_bias)
    kind = sizes.family.mlp
    entries = {
        "gated": {"gate": width, "up": width},
        "fused": {"gate up": 2 * width},
        "plain": {"up": width},
    }[kind]
    weights = [Weight(name + each, (size, hidden), 0) for each, size in entries.items()]
    weights.append(Weight(f"{name}down", (hidden, width), 1))
    if bias:
        weights += [Weight(f"{name}{each} bias", (size,), 0) for each, size in entries.items()]
        weights.append(Weight(f"{name}down bias", (hidden,)))
    return weights


def _experts(
    sizes: _Sizes, hidden: int, width: int, experts: int, met: float
) -> Sequence[Weight]:
    weights = [
        Weight("router", (experts, hidden)),
        Weight("experts gate up", (experts, 2 * width, hidden), 1, met),
        Weight("experts down", (experts, hidden, width), 2, met),
    ]
    if sizes.family.expert_bias:
        biases = {
            "router": (experts,),
            "experts gate up": (experts, 2 * width),
            "experts down": (experts, hidden),
        }
        weights += [Weight(f"{name} bias", shape, met=met) for name, shape in biases.items()]
    return weights


def _norm(name: str, width: int, kind: str) -> Sequence[Weight]:
    if kind == "none":
        return []
    weight = Weight(name, (width,))
    return [weight, Weight(f"{name} bias", (width,))] if kind == "layer" else [weight]


def _is_sparse(sizes: _Sizes, place: int) -> bool:
    if not sizes.family.experts:
        return False
    step = sizes.values.get("decoder_sparse_step") or 1
    dense = sizes.values.get("mlp_only_layers") or ()
    return place not in dense and (place + 1) % step == 0


def _window(sizes: _Sizes, place: int) -> int | None:
    values, family = sizes.values, sizes.family
    window = values.get("sliding_window")
    if family.sliding == "none" or not window or values.get("use_sliding_window") is False:
        return None
    kinds = values.get("layer_types")
    if family.sliding == "layer_types" and kinds:
        return int(window) if kinds[place] == "sliding_attention" else None
    every = values.get("sliding_window_pattern") or family.full_every
    if family.sliding == "layer_types":
        return int(window) if every and (place + 1) % int(every) else None
    return int(window)
