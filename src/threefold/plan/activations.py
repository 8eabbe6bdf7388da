"""The bytes that a layer keeps from its forward to its backward, and those that its backward works with.

Counted from what autograd saves in transformers' layers: the inputs of products, norms and activations. A norm computes
in float32 and keeps that copy of its input besides its output; attention keeps queries, keys, values, its result and
a float32 for each head (FlashAttention, arXiv:2205.14135); an MLP keeps gate, its activation, up and their product.
"""

from typing import NamedTuple

from threefold.plan.decoder import Decoder, Layer
from threefold.plan.families import Family
from threefold.plan.setup import Setup

FLOAT = 4


class Activations(NamedTuple):
    """Bytes for one layer and one micro-batch, on one rank.

    Attributes:
        kept: from forward to backward, with the recomputation that is asked for.
        again: what else exists while the layer is computed again; 0 where it is not.
        working: gradients inside it, at most.
    """

    kept: float
    again: float
    working: float


def norm_bytes(family: Family, element: int, *, frozen: bool = False) -> float:
    """Kept by a norm for one number of its input, without what it gives; `frozen`: nothing for its weight."""
    kinds = {
        # The input in float32, and the normalised input in the model's type.
        "rms": FLOAT + element * (not frozen),
        "rms_float32": FLOAT * (2 - frozen),
        "layer": element,  # the input as it is
        "layer_no_bias": FLOAT * (3 - frozen),
        "none": FLOAT,
    }
    return kinds[family.norm]


def activations_of(decoder: Decoder, layer: Layer, setup: Setup) -> Activations:
    """For this set-up."""
    saved = (
        _compiled(decoder, layer, setup) if setup.compiled else _eager(decoder, layer, setup)
    )
    working = _working(decoder, layer, setup)
    inputs = setup.stream * decoder.hidden * setup.element
    if setup.recompute == "none":
        return Activations(saved, 0.0, working)
    if setup.recompute == "offload":
        return Activations(0.0, saved + 2 * inputs, working)
    if setup.recompute == "full":
        return Activations(inputs, saved, working)
    products = _products(decoder, layer, setup)
    return Activations(inputs + products, max(0.0, saved - products), working)


def _working(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    """Gradients inside a layer at most, less what was kept and has gone by then.

    In its MLP: those of gate, up and their product, beyond what they replace. In the norm before it, whose backward
    computes in float32 and whose MLP is done: four tensors as large as the hidden states.
    """
    tokens = setup.tokens
    element = setup.element
    tp = setup.topology.tp
    hidden = decoder.hidden
    streams = 2 * setup.stream * hidden * element
    if layer.chosen:
        # In the order of the experts, in that of the tokens, and weighed: results of all chosen ones.
        number = FLOAT if decoder.family.float32_routing else element
        return streams / 2 + 3 * tokens * layer.chosen * hidden * number
    wide = (
        tokens
        * element
        * (2 + (layer.rank > 0 and not layer.has_adapter("down")))
        * layer.width
        / tp
    )
    if setup.compiled or decoder.family.norm == "layer":
        return wide + streams
    done = tokens * _mlp(decoder, layer, setup)
    return streams + max(wide, setup.stream * hidden * (4 * FLOAT + element) - done)


def _product_is_let_go(layer: Layer) -> bool:
    """Whether a frozen last projection of the MLP leaves nothing that reads its input again."""
    return layer.rank > 0 and (layer.dropped or not layer.has_adapter("down"))


def _queries(layer: Layer, setup: Setup) -> tuple[float, float]:
    """Numbers of a token's queries, and of its keys (or values), on a tp rank."""
    tp = setup.topology.tp
    return layer.heads * layer.head_dim / tp, layer.kv_heads * layer.head_dim / tp


def _eager(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    """For a layer whose operators run one by one."""
    tokens = setup.tokens
    element = setup.element
    family = decoder.family
    hidden = decoder.hidden
    norms = (
        family.num_norms
        * setup.stream
        * hidden
        * norm_bytes(family, element, frozen=bool(layer.rank))
    )
    # Products read the outputs of norms, except of norms after a sum; a frozen one does not keep its input.
    read = 1 if family.num_norms == 1 else 2
    if layer.rank:
        readers = (
            layer.has_adapter("q", "k", "v", "qkv"),
            layer.has_adapter("gate", "up", "gate up"),
        )
        read = 0 if layer.dropped else min(read, sum(readers))
    inputs = read * tokens * hidden * element
    own = (
        norms
        + inputs
        + _attention(decoder, layer, setup)
        + tokens * _mlp(decoder, layer, setup)
    )
    return own + tokens * _adapters(layer, setup, products=False)


def _adapters(layer: Layer, setup: Setup, *, products: bool) -> float:
    """Per token: results of the first of two products, and of both `products`; inputs with dropout."""
    kept, element = 0.0, setup.element
    # The dropout mask; on a CPU it is a factor.
    mask = 1 if setup.device is not None else element
    for weight in layer.weights:
        if weight.name in layer.adapters:
            outputs, inputs = weight.local(setup.topology.tp)
            kept += element * (layer.rank + (outputs if products else 0))
            kept += (element + mask) * inputs * (layer.dropped and not products)
    return kept


def _attention(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    tokens, element, cp = setup.tokens, setup.element, setup.topology.cp
    queries, keys = _queries(layer, setup)
    all_keys = keys * (cp if cp > 1 and not setup.ulysses else 1)
    if setup.device is None and layer.window is not None and layer.window < setup.seq_len:
        # Of a CPU's attention with a mask, for which keys are repeated for each query.
        all_keys = max(all_keys, queries)
    kept = element * (2 * queries + 2 * all_keys) + FLOAT * layer.heads / setup.topology.tp
    if cp > 1:
        # The result in the order of the row, and in that of this rank.
        kept += element * queries
    if any(weight.name == "q norm" for weight in layer.weights):
        kept += (queries + keys) * norm_bytes(decoder.family, element, frozen=bool(layer.rank))
    return tokens * kept + _masks(setup)


def _masks(setup: Setup) -> float:
    """Of gathered keys: a CPU's attention takes a mask for each half of the queries, in the model's type."""
    cp = setup.topology.cp
    if cp == 1 or setup.ulysses or setup.device is not None:
        return 0.0
    chunk = setup.seq_len // (2 * cp)
    return setup.element * chunk * chunk * (2 * cp + 1)


def _mlp(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    """Per token."""
    element, tp, hidden = setup.element, setup.topology.tp, decoder.hidden
    numbers = (2 if decoder.family.mlp == "plain" else 4) - _product_is_let_go(layer)
    if not layer.chosen:
        return element * numbers * layer.width / tp
    # A chosen expert's copy of the token and its result, and where they belong.
    each = element * (2 * hidden + numbers * layer.width / tp) + 3 * 8
    return (
        layer.chosen * each
        + element * numbers * layer.shared_width / tp
        + 2 * FLOAT * layer.experts
    )


def _products(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    """Results of products and of attention, which selective recomputation keeps."""
    tokens = setup.tokens
    element = setup.element
    tp = setup.topology.tp
    hidden = decoder.hidden
    queries, keys = _queries(layer, setup)
    attention = element * (2 * queries + 2 * keys + hidden) + FLOAT * layer.heads / tp
    entries = 1 if decoder.family.mlp == "plain" else 2
    if not layer.chosen:
        own = attention + element * (entries * layer.width / tp + hidden)
        return tokens * (own + _adapters(layer, setup, products=True))
    shared = (
        element * (entries * layer.shared_width / tp + hidden + 1)
        if layer.shared_width
        else 0.0
    )
    return tokens * (attention + element * layer.experts + shared)


def _compiled(decoder: Decoder, layer: Layer, setup: Setup) -> float:
    """Of a layer in one graph: inputs and results of products and of attention, and no copies in float32.

    A compiler may compute more of it again: this is the most, and was not measured.
    """
    tokens = setup.tokens
    element = setup.element
    tp = setup.topology.tp
    hidden = decoder.hidden
    queries, keys = _queries(layer, setup)
    numbers = (2 if decoder.family.mlp == "plain" else 3) * (
        max(1, layer.chosen) * layer.width + layer.shared_width
    )
    inner = element * (2 * queries + 2 * keys + numbers / tp + 2 * hidden * (1 + layer.chosen))
    return 2 * setup.stream * (hidden * element + FLOAT) + tokens * (
        inner + FLOAT * layer.heads / tp
    )
