"""The names of other programs' checkpoints: maps their tensors to a model's weights and AdamW's moments.

Names of transformers, with or without what DDP, FSDP, torch.compile and activation checkpointing put into them, under
any prefix (`model.` of accelerate); and torchtitan's own names of Llama 3 and Qwen3. Nothing is guessed: each weight is
found once, with its shape, every tensor of the other checkpoint is accounted for, or the whole is refused by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from threefold.convert.dcp_reader import Foreign, TensorFormat
from threefold.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
Convert = Callable[[Tensor], Tensor]

_WRAPPED = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Entries that belong to the other program's optimizer, schedule, data or random numbers.
_STATE = re.compile(
    r"(^|\.)(optim|optimizer|optimizers|lr_scheduler|scheduler|dataloader|train_state|random|rng)(\.|_|$)"
)
# Projections that torchtitan computes at once, and saves as three weights, but as one moment.
_FUSED = re.compile(r"(.+\.qkv_linear\.)wqkv\.(\w+)$")
# Tables that a model computes for itself.
_COMPUTED = re.compile(r"(^|\.)(freqs_cis|rope_cache|rotary_emb\.(original_)?inv_freq)$")

# torchtitan's names inside `layers.N.`, in its present and its earlier versions, and those of transformers.
_TITAN_LAYER = {
    **{
        f"attention.{at}w{x}.weight": f"self_attn.{x}_proj.weight"
        for at in ("", "qkv_linear.")
        for x in "qkv"
    },
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_TITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
TITAN_FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class Wanted:
    """The tensors that a model needs.

    Attributes:
        weights: shape of each, by its name in the model.
        trained: the weights that have moments.
        family: the config's `model_type`.
        heads: of queries, and of keys.
        head_tied: the head is the embedding.
    """

    weights: Mapping[str, tuple[int, ...]]
    trained: frozenset[str]
    family: str
    heads: tuple[int, int]
    head_tied: bool


@dataclass(frozen=True)
class Found:
    """Which entry of the other checkpoint each tensor is.

    Attributes:
        program: whose names they are.
        weights: (entry, what makes it this program's tensor), by the names in the model.
        moments: the same of each moment, `exp_avg` and so on; empty without an optimizer's state.
        twins: (name, other name) of entries that must be equal: a head that is the embedding.
        left_out: entries that are no weights and no moments.
    """

    program: str
    weights: Mapping[str, tuple[str, Convert]]
    moments: Mapping[str, Mapping[str, tuple[str, Convert]]] = field(default_factory=dict)
    twins: Sequence[tuple[str, str]] = ()
    left_out: Sequence[str] = ()


def find_names(
    foreign: Foreign, wanted: Wanted, *, where: str, weights_alone: bool = False
) -> Found:
    """Finds every weight and moment of `wanted`; with `weights_alone`, moments are left out, whatever they are.

    Raises:
        CheckpointError: weights are missing, have another shape, or are of another model; moments are incomplete; or
            tensors are left over.
    """
    own = {name: _WRAPPED.sub("", name) for name in foreign.tensors}
    moments = {
        name: parts for name, plain in own.items() if (parts := _moment(plain)) is not None
    }
    rest = {name: plain for name, plain in own.items() if name not in moments}
    candidates = {name: plain for name, plain in rest.items() if not _STATE.search(plain)}
    program, names = _best(candidates, wanted)
    weights = {
        ours: name
        for name, plain in candidates.items()
        if (ours := names(plain)) in wanted.weights
    }
    # Also a weight that occurs again, such as that of another model beside it: which one is meant is unknown.
    over = [name for name, plain in candidates.items() if weights.get(names(plain)) != name]
    twins = [
        (name, weights[ours])
        for name in over
        if (ours := _tied(names(candidates[name]), wanted)) in weights
    ]
    over = [name for name in over if name not in dict(twins) and not _COMPUTED.search(name)]
    _refuse(weights, over, foreign.tensors, wanted, where=where)
    convert = _conversions(wanted) if program == "torchtitan" else {}
    pairs = {ours: (name, convert.get(ours, _same)) for ours, name in weights.items()}
    made = (
        {}
        if weights_alone
        else _moments_of(moments, names, convert, foreign.tensors, wanted, where=where)
    )
    left = (
        [name for name in rest if name not in candidates]
        + [*foreign.others]
        + [*moments] * weights_alone
    )
    return Found(program, pairs, made, twins, left)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _moment(name: str) -> tuple[str, str] | None:
    """(moment, the weight's name) of `optimizer.state.NAME.exp_avg`, or of `optimizer.exp_avg.NAME`."""
    ours = re.match(rf"optimizer\.({'|'.join(MOMENTS)})\.(.+)", name)
    theirs = re.match(rf"(?:\w+\.)*?state\.(.+)\.({'|'.join(MOMENTS)})$", name)
    return (ours[1], ours[2]) if ours else (theirs[2], theirs[1]) if theirs else None


def _best(candidates: Mapping[str, str], wanted: Wanted) -> tuple[str, Callable[[str], str]]:
    """The program whose names give the most of the weights, and the function from them to the model's."""
    prefixes = {
        plain[: -len(end)]
        for end in [*wanted.weights][:1] + [*wanted.weights][-1:]
        for plain in candidates.values()
        if plain.endswith(f".{end}")
    }
    ways: list[tuple[str, Callable[[str], str]]] = [
        ("transformers", partial(_without, prefix=prefix))
        for prefix in sorted({"", *prefixes}, key=len)
    ]
    if wanted.family in TITAN_FAMILIES:
        ways.append(("torchtitan", _from_titan))
    return max(
        ways,
        key=lambda way: len(
            {way[1](plain) for plain in candidates.values()} & wanted.weights.keys()
        ),
    )


def _without(name: str, *, prefix: str) -> str:
    return name.removeprefix(prefix)


def _from_titan(name: str) -> str:
    name = name.removeprefix("model.")
    if (layer := re.match(r"layers\.(\d+)\.(.+)", name)) is not None:
        return f"model.layers.{layer[1]}.{_TITAN_LAYER.get(layer[2], layer[2])}"
    return _TITAN.get(name, name)


def _tied(name: str, wanted: Wanted) -> str:
    """The weight that a head is, if the model's head is the embedding."""
    return "model.embed_tokens.weight" if wanted.head_tied and name == "lm_head.weight" else ""


def _conversions(wanted: Wanted) -> dict[str, Convert]:
    """torchtitan's Llama rotates neighbours, (0, 1), (2, 3) and so on; transformers the halves of a head."""
    if wanted.family != "llama":
        return {}

    def halves(heads: int) -> Convert:
        # [heads, pairs, 2, inputs] -> [heads, 2, pairs, inputs]
        return lambda values: (
            values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        )

    conversions: dict[str, Convert] = {}
    for name in wanted.weights:
        for kind, heads in zip(("q_proj", "k_proj"), wanted.heads, strict=True):
            if name.endswith((f".{kind}.weight", f".{kind}.bias")):
                conversions[name] = halves(heads)
    return conversions


def _refuse(
    weights: Mapping[str, str],
    over: Sequence[str],
    tensors: Mapping[str, TensorFormat],
    wanted: Wanted,
    *,
    where: str,
) -> None:
    problems = []
    if missing := [name for name in wanted.weights if name not in weights]:
        problems.append(
            f"{_some(missing)} of the model {'is' if len(missing) == 1 else 'are'} not in it"
        )
    if over:
        problems.append(
            f"{_some(over)} {'is' if len(over) == 1 else 'are'} not in the model, or given twice"
        )
    other = [
        name for name, entry in weights.items() if tensors[entry].shape != wanted.weights[name]
    ]
    if other:
        shape, theirs = list(wanted.weights[other[0]]), list(tensors[weights[other[0]]].shape)
        problems.append(f"{_some(other)}: {shape} in the model, {theirs} in it")
    if problems:
        raise CheckpointError(
            f"{where} does not hold the weights of this model: {'; '.join(problems)}",
            expected="each weight once, with its shape, by transformers' names, or torchtitan's of Llama 3 and Qwen3",
            fix="name the config that the checkpoint was trained with",
        )


def _moments_of(
    moments: Mapping[str, tuple[str, str]],
    names: Callable[[str], str],
    convert: Mapping[str, Convert],
    tensors: Mapping[str, TensorFormat],
    wanted: Wanted,
    *,
    where: str,
) -> dict[str, dict[str, tuple[str, Convert]]]:
    """Each moment's entries by the weights' names, and what converts them to this program's; empty without any."""
    entries: dict[str, dict[str, tuple[str, Convert]]] = {moment: {} for moment in MOMENTS}
    strange = []
    # Under a prefix that may be another than that of the weights: Lightning's is shorter.
    _, own_names = _best({entry: plain for entry, (_, plain) in moments.items()}, wanted)
    for entry, (moment, plain) in moments.items():
        own = _in_entry(plain, (names, own_names), wanted)
        shapes = [wanted.weights[name] for name in own]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes else None
        allowed = [(), (1,)] if moment == "step" else [whole]
        if not own:
            if not _tied(names(plain), wanted):
                strange.append(entry)
        elif tensors[entry].shape not in allowed or own.keys() & entries[moment].keys():
            strange.append(entry)
        else:
            for name, part in own.items():
                ways = () if moment == "step" else (part, convert.get(name, _same))
                entries[moment][name] = entry, partial(_through, ways)
    if not moments:
        return {}
    missing = [
        f"{moment} of {name}"
        for moment in MOMENTS
        for name in sorted(wanted.trained - entries[moment].keys())
    ]
    if strange or missing:
        what = (
            f"{_some(strange)} of no weight of the model, or given twice"
            if strange
            else f"{_some(missing)} missing"
        )
        raise CheckpointError(
            f"{where} has no complete state of AdamW: {what}",
            expected="exp_avg, exp_avg_sq and step of every weight that is trained",
            fix="--weights   (makes a Hugging Face folder of the weights alone)",
        )
    return entries


def _in_entry(
    plain: str, ways: Sequence[Callable[[str], str]], wanted: Wanted
) -> dict[str, Convert]:
    """The trained weights whose moment an entry is, with what takes each one's part out of it."""
    if (fused := _FUSED.match(plain)) is None:
        return {way(plain): _same for way in ways if way(plain) in wanted.trained}
    parts: dict[str, Convert] = {
        ways[0](f"{fused[1]}w{kind}.{fused[2]}"): partial(_part, kind, wanted.heads)
        for kind in "qkv"
    }
    return parts if parts.keys() <= wanted.trained else {}


def _part(kind: str, heads: tuple[int, int], values: Tensor) -> Tensor:
    """Of [kv heads x (queries of each + key + value) x head, ..] the rows of queries, keys or values."""
    queries = heads[0] // heads[1]
    taken = {
        "q": slice(0, queries),
        "k": slice(queries, queries + 1),
        "v": slice(queries + 1, None),
    }[kind]
    return values.unflatten(0, (heads[1], queries + 2, -1))[:, taken].flatten(0, 2)


def _through(ways: Sequence[Convert], values: Tensor) -> Tensor:
    for way in ways:
        values = way(values)
    return values


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"
