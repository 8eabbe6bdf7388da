"""Admits an architecture to this mesh, or refuses it by name, before its weights are loaded.

The architecture is built at reduced depth and width, with random weights, on the real mesh, and probed there. A model
that fails is refused with the probe, its figure, the axis of the mesh that is wrong and what works instead: the
axes are tried one by one, and the run's rows without documents.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from transformers import PretrainedConfig

from threefold.check import admission_cache, probes
from threefold.check.admission_cache import code_digest
from threefold.check.compare import PROBE_GRADIENT, REAL_SIZE, Comparison, Difference
from threefold.check.probe_rows import Mode, longer_row, row_length
from threefold.check.probes import PROMISES, OwnForwardError, Subject, probe
from threefold.check.real_size import NOT_COMPARED, real_sizes
from threefold.config.schema import Config, LoraConfig
from threefold.errors import ConfigError, ThreefoldError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.model import load, lora
from threefold.model.layer_kinds import heads_of, leading_layers
from threefold.model.reduced import reduced, shallow
from threefold.plan import choices

# A failure is confirmed with other weights and rows before a model is refused: a router's near tie can fall either way.
_SEEDS = (0, 1)
_OFF = "--model.admission off   (trains it unchecked)"
_PLAIN = {"document_mask": False, "packing": "concat"}


class RefusedError(ConfigError):
    """A probe of the model does not hold on this mesh."""


class _Tried(NamedTuple):
    results: list[Difference]
    error: Exception | None

    @property
    def holds(self) -> bool:
        return self.error is None and Comparison(self.results).holds


def admit(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> tuple[str, str]:
    """Probes the architecture on the mesh as the config would train it; every rank calls it.

    Returns:
        (what was probed, how well it holds), to be printed.

    Raises:
        ConfigError: a probe does not hold, or the model cannot be computed on this mesh; on every rank.
    """
    if config.model.admission == "off":
        return (
            "admission: off",
            "model.admission is off: this model was not checked on this mesh",
        )
    begun = time.perf_counter()
    subject = _subject_or_refusal(config, architecture, mesh)
    outline = load.outline(subject.architecture, subject.config.model)
    key = mesh.decide_on(
        "code",
        lambda: tuple(code_digest(outline, probes)),
        lambda codes: _key(subject, mesh, codes),
    )
    if key is not None and config.model.admission == "auto":
        kept = mesh.share(
            "admission", lambda: [vars(result) for result in admission_cache.read(key) or ()]
        )
        if kept:
            return _said(subject, [Difference(**values) for values in kept], "found before")
    tried = _tried(subject, mesh)
    if tried.error is not None:
        raise _refusal(config, architecture, mesh, tried)
    if not tried.holds:
        again = [_tried(replace(subject, seed=seed), mesh) for seed in _SEEDS[1:]]
        if not any(each.holds for each in again):
            raise _refusal(config, architecture, mesh, tried)
        tried = next(each for each in again if each.holds)
    if mesh.rank == 0 and key is not None:
        admission_cache.keep(key, tried.results)
    return _said(subject, tried.results, f"{time.perf_counter() - begun:.1f} s")


def _key(
    subject: Subject, mesh: Mesh, codes: list[tuple[str | None, str | None]]
) -> str | None:
    """The name under which a result is kept, of every rank's `CodeDigest`; None: it is not."""
    classes = [classes for classes, _ in codes]
    if other := [str(rank) for rank, digest in enumerate(classes) if digest != classes[0]]:
        raise ConfigError(
            f"the code of the model on rank{'s' * (len(other) > 1)} {', '.join(other)} differs from rank 0's",
            expected="the same files and the same patched classes on every rank",
            fix="start all ranks from one installation, and patch classes on every rank or on none",
        )
    whole = {whole for _, whole in codes}
    return (
        admission_cache.key_of(subject, mesh, code)
        if len(whole) == 1 and (code := whole.pop())
        else None
    )


def _said(subject: Subject, results: list[Difference], when: str) -> tuple[str, str]:
    """The comparisons, with the figure of the gradients, which covers the most."""
    num_probes = len({result.quantity for result in results} - {"positions", NOT_COMPARED})
    figures = [
        result.figure for result in results if result.quantity == PROBE_GRADIENT.quantity
    ]
    lengths = " and ".join(
        map(str, (subject.config.data.seq_len, subject.longer)[: len(figures)])
    )
    details = [
        each.detail for each in results if each.quantity in (REAL_SIZE.quantity, NOT_COMPARED)
    ]
    real = (
        f"losses {', '.join(details)}"
        if details
        else "not at its real size: too large, or shorter rows"
    )
    gradients = f"gradients within {max(figures):.0e} of the model's own in one process, in rows of {lengths} tokens"
    return f"admission: {num_probes} probes hold", f"causal, and {gradients}; {real}; {when}"


def _subject_or_refusal(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> Subject:
    try:
        return _subject(config, architecture, mesh)
    except Exception as error:  # a config of any class
        name = config.model.name_or_path or architecture.model_type
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{name!r} cannot be reduced: {reason}",
            expected="an architecture that can be built at reduced size, to be probed on this mesh",
            fix=_OFF,
        ) from error


def _subject(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> Subject:
    """The subject of the probes for this run; every rank calls it."""
    # Up to two ranks a core are as fast as one.
    share = mesh.share(
        "a rank's share", lambda: min(1.0, 2 * environment.num_cores() / mesh.local_world_size)
    )
    topology, device = mesh.topology, mesh.device.type
    seq_len = row_length(topology, device=device)
    # For the run, whose rows are longer than those of a probe: it is probed as it will be computed.
    asked = config.mesh
    run_length = config.data.seq_len
    heads = heads_of(architecture)
    method = choices.cp_method(asked.cp_method, topology, heads=heads, seq_len=run_length).value
    shared_evenly = run_length % (topology.cp * topology.tp) == 0
    ranks = topology.tp * (topology.cp if method == "ulysses" else 1)
    leading = _leading(config, architecture)
    small = reduced(
        architecture, ranks=ranks, seq_len=seq_len, real_seq_len=run_length, leading=leading
    )
    as_probed = config.changed(
        model={"dtype": "float32", "lora": _adapters(config, small)},
        data={"seq_len": seq_len},
        # Chunks of the head that do not divide the tokens.
        train={"compile": False, "float8": "none", "loss_chunk_tokens": 7},
        mesh={
            "cpu_offload": False,
            "cp_method": method,
            "sequence_parallel": asked.sequence_parallel if shared_evenly else False,
        },
    )
    real = real_sizes(config, architecture, topology, ranks=ranks, leading=leading, share=share)
    narrow = None
    if config.model.dtype == "bfloat16":  # with the kernels of the run
        compiled = config.train.compile if device == "cuda" else False
        narrow = as_probed.changed(model={"dtype": "bfloat16"}, train={"compile": compiled})
    longer = longer_row(topology, device=device)
    return Subject(
        as_probed, small, Mode.of(config.data), narrow=narrow, longer=longer, real=real
    )


def _adapters(config: Config, small: PretrainedConfig) -> LoraConfig:
    """The run's adapters without dropout; none where their names do not fit the reduced model (`layers.20.`)."""
    asked = config.model.lora
    build = partial(load.outline, small, config.model)
    unfit = asked.r and lora.problems(asked, build, name=small.model_type)
    return asked.model_copy(update={"r": 0} if unfit else {"dropout": 0.0})


def _leading(config: Config, architecture: PretrainedConfig) -> int:
    """How many of the first layers a cut model must have, so that each kind of layer is probed."""
    try:
        cut = load.outline(shallow(architecture), config.model)
    except Exception:  # a config whose values are tied to its depth
        return 0
    whole = load.outline(architecture, config.model)
    return leading_layers(load.layers_of(whole), load.layers_of(cut))


def _tried(subject: Subject, mesh: Mesh) -> _Tried:
    """The results, or the error that the model gave instead of them."""
    try:
        return _Tried(probe(subject, mesh), None)
    except ThreefoldError:
        raise
    except Exception as error:  # whatever a model's code may raise
        return _Tried([], error)


def _refusal(
    config: Config, architecture: PretrainedConfig, mesh: Mesh, tried: _Tried
) -> ConfigError:
    """Why the model is refused, and what works instead."""
    name = config.model.name_or_path or architecture.model_type
    if tried.error is not None:
        # Other ranks may wait in a collective that this one never reached: nothing is asked of them.
        if isinstance(tried.error, OwnForwardError):
            reason = " ".join(str(tried.error).split())
            return ConfigError(
                f"{name!r} cannot be computed by transformers: {reason}",
                expected="sizes that fit one another, as transformers' own forward needs them",
                fix="see the architecture's config page in the transformers documentation",
            )
        reason = " ".join(f"{type(tried.error).__name__}: {tried.error}".split())
        where, fix = _alone(config, architecture, mesh) or (
            f"on {mesh.topology}",
            _without(_several(mesh)),
        )
        return ConfigError(
            f"{name!r} cannot be computed {where}: {reason[:300]}",
            expected="an architecture whose step works there, with the model's own forward to compare it with",
            fix=fix,
        )
    where, fix = _diagnosis(config, architecture, mesh)
    failed = [result for result in tried.results if not result.holds]
    first, *others = sorted(failed, key=lambda result: [*PROMISES].index(result.quantity))
    what, expected = PROMISES[first.quantity]
    at = f" ({first.place})" if first.place else ""
    positions = next(
        (result.detail for result in tried.results if result.quantity == "positions"), ""
    )
    if first.quantity in ("loss", "gradients") and positions != "reads position_ids":
        at += f" (it {positions})" if positions else ""
    if first.quantity == "causality" and fix == _OFF:
        fix = "use another architecture: this one would be trained to read its targets"
    also = "".join(f", {result.quantity} {result.figure:.1e}" for result in others)
    measured = f"{what.format(first.figure)}{at}" + (
        f"; also fails: {also[2:]}" if also else ""
    )
    return RefusedError(
        f"{name!r} fails the probe of {first.quantity} {where}: {measured}",
        expected=expected.format(first.bound),
        fix=fix,
    )


def _diagnosis(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> tuple[str, str]:
    """(where the model fails, what works instead), by trying parts of the request; every rank calls it."""
    if (
        alone := mesh.share("admission alone", lambda: _alone(config, architecture, mesh))
    ) is not None:
        return alone[0], alone[1]
    wrong = [axis for axis, smaller in _axes(mesh) if not _holds(config, architecture, smaller)]
    if not wrong:
        return f"on {mesh.topology} (each of its axes alone works)", _without(_several(mesh))
    return f"on {mesh.topology}, for its {' and '.join(wrong)}", _without(wrong)


def _several(mesh: Mesh) -> list[str]:
    """The axes to leave out first: tp and cp, or else those of the data ranks."""
    axes = [axis for axis in ("cp", "tp") if mesh.size(axis) > 1]
    return axes or (["dp_shard"] if mesh.topology.dp_shard > 1 else ["dp"])


def _alone(
    config: Config, architecture: PretrainedConfig, mesh: Mesh
) -> tuple[str, str] | None:
    """(where, what works instead) if the model fails in one process too; None if it does not."""
    one = Mesh(Topology(), 0, mesh.device)
    if _holds(config, architecture, one):
        return None
    if config.model.dtype != "float32":
        plain = {"model": {"attention": "sdpa"}, "train": {"compile": False}}
        for changes, fix in (
            (plain, "--model.attention sdpa --train.compile false"),
            ({"model": {"dtype": "float32"}}, "--model.dtype float32"),
        ):
            if _holds(config.changed(**changes), architecture, one):
                return "in bfloat16, on any mesh", fix
    for change, where, fix in (
        ({"document_mask": False}, "with documents kept apart", "--data.document_mask false"),
        ({"packing": "concat"}, "with padded rows", "--data.packing concat"),
        (
            _PLAIN,
            "with documents kept apart or padded rows",
            "--data.document_mask false --data.packing concat",
        ),
    ):
        without = config.changed(data=change)
        if Mode.of(without.data) != Mode.of(config.data) and _holds(without, architecture, one):
            return f"{where}, on any mesh", fix
    decoder = copy.deepcopy(architecture)
    decoder.get_text_config().is_decoder = True
    if not getattr(architecture.get_text_config(), "is_decoder", True) and _holds(
        config, decoder, one
    ):
        named = "--model.config '{..., is_decoder: true}'"
        if config.model.name_or_path is not None:
            named = f'"is_decoder": true in {config.model.name_or_path}/config.json'
        return "on any mesh", f"{named}   (without, it is bidirectional)"
    return "on any mesh", _OFF


def _holds(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> bool:
    ep = config.mesh.ep if config.mesh.ep == mesh.topology.tp else 1
    try:
        return _tried(_subject(config.changed(mesh={"ep": ep}), architecture, mesh), mesh).holds
    except ThreefoldError:
        return False


def _without(axes: Sequence[str]) -> str:
    others = "" if "dp" in axes else "   (use mesh.dp instead)"
    return " ".join(f"--mesh.{axis} 1" for axis in axes) + others


def _axes(mesh: Mesh) -> Iterator[tuple[str, Mesh]]:
    """Each axis of the mesh alone, over all of its ranks; the rest are data ranks."""
    asked = mesh.topology
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        size = getattr(asked, axis)
        if size == 1:
            continue
        name = "dp"
        smaller = Topology(dp_replicate=mesh.world_size)
        if axis != "dp_replicate":
            name = axis
            smaller = Topology(**{"dp_replicate": mesh.world_size // size, axis: size})
        if smaller == asked:
            yield name, mesh
        else:
            yield (
                name,
                join_mesh(
                    smaller, environment.current(), device=mesh.device.type, timeout_s=600.0
                ),
            )
