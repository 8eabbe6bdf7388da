"""Published speeds of other programs against the planner's estimate.

    python benchmarks/speeds.py           how far estimates are off, of both halves
    python benchmarks/speeds.py --fit     the rates of `plan/efficiency.py` and of `PROGRAMS`, fitted in half a minute
    python benchmarks/speeds.py --page    writes the tables of docs/plan.md

`tests/published_speeds.json` holds a row for each: the model as its config, the devices and the mesh, what is computed
again, the type of the products, tokens/s of a device, and where that stands. Two halves were made before anything was
fitted: rates are fitted on one, and the other only judges them. A row's half is stored, and follows from its source and
its model (`halves`): rows that share both would tell each other's result, so they are in the same half.

The estimate is the planner's own, `plan.duration`, with what the other program does in place of ours (`estimate`):
how much it computes again, its attention kernel, its products in 8 bits, a power limit, gradients that it sends in
bfloat16, a ring for cp and experts on their own ranks. Each of these is a fact of its row, or one number for all rows
(`PROGRAMS`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from threefold.config.loading import validate  # noqa: E402
from threefold.mesh.topology import Topology  # noqa: E402
from threefold.plan.accelerators import ACCELERATORS  # noqa: E402
from threefold.plan.adapters import adapted  # noqa: E402
from threefold.plan.decoder import Decoder, decoder_of  # noqa: E402
from threefold.plan.duration import Duration, duration  # noqa: E402
from threefold.plan.efficiency import (  # noqa: E402
    EFFICIENCIES,
    Efficiency,
    Margin,
    efficiency_of,
    family_of,
    margin_of,
)
from threefold.plan.fabric import fabric_of  # noqa: E402
from threefold.plan.setup import Setup  # noqa: E402

ROWS = ROOT / "tests" / "published_speeds.json"
PAGE = ROOT / "docs" / "plan.md"


def read() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """(config of each model, all rows)."""
    published = json.loads(ROWS.read_text(encoding="utf-8"))
    return published["models"], published["rows"]


# --- the two halves


def stratum(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What both halves should have some of: a device, mixtures or not, products in 8 bits or not."""
    mixture = "mixture" if "a3b" in row["model"] else "dense"
    return row["device"], mixture, "bf16" if row["precision"] == "bf16" else "float8"


def _group(row: Mapping[str, Any]) -> str:
    """Rows of one source (whatever its release) and one model."""
    return f"{row['source'].split(', 2')[0]}|{row['model']}"


def _digest(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()


def halves(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`fit` or `judge` for each row: in a stratum, the groups in the order of their digests by turns.

    A group that is alone in its stratum goes where the parity of its digest says.
    """
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for row in rows:
        groups[stratum(row)].add(_group(row))
    half: dict[tuple[tuple[str, str, str], str], str] = {}
    for key, members in groups.items():
        for place, group in enumerate(sorted(members, key=_digest)):
            turn = int(_digest(group), 16) if len(members) == 1 else place
            half[key, group] = "judge" if turn % 2 else "fit"
    return [half[stratum(row), _group(row)] for row in rows]


# --- the estimate of a row

# What other programs do by other means than ours, one number for all their rows:
PROGRAMS = {
    "flash 2": 0.66,  # FlashAttention 2 on Hopper, of cuDNN's attention (arXiv:2307.08691, arXiv:2407.08608)
    "flash 1": 0.58,  # FlashAttention 1, of FlashAttention 2
    "te": 1.89,  # products in 8 bits of NVIDIA's Transformer Engine, of those in bfloat16, without their casts
    "ring": 1.55,  # attention of torchtitan's ring on more than two cp ranks: times as long as in one piece
    "watts": 0.34,  # the peak of a device held below 700 W: its power to this (power goes with the cube of clocks)
    "exchange": 0.63,  # of the exchanges of tokens between experts' ranks, what is waited for
}
_RECIPES = {
    "bf16": "none",
    "float8 tensorwise": "tensorwise",
    "float8 rowwise": "rowwise",
    "float8 te": "tensorwise",
}
# GB/s of the memory of torchtitan's devices of 500 W (HBM2e), as its page says.
_BANDWIDTH_500_W = 2.4e12


@dataclass(frozen=True)
class _Setup(Setup):
    """A set-up whose gradients, or weights for products in 8 bits, are sent in another type than ours."""

    sent_element: int = 4
    narrow: bool = True

    @property
    def gathers_8_bits(self) -> bool:
        return self.narrow and super().gathers_8_bits

    @property
    def reduced_element(self) -> int:
        return self.sent_element


@lru_cache
def _decoder(model: str, rank: int) -> Decoder:
    models, _ = read()
    decoder = decoder_of(models[model])
    if not rank:
        return decoder
    lora = {"r": rank, "target_modules": "all-linear"}
    return adapted(decoder, validate({"model": {"lora": lora}}).model.lora)


def reached_by(
    row: Mapping[str, Any], own: Efficiency, programs: Mapping[str, float]
) -> Efficiency:
    """What the kernels of a row's program reach."""
    attention = own.attention
    if row["attention"] != "cudnn":
        attention *= (
            programs["flash 2"] if family_of(ACCELERATORS[row["device"]]) == "H100" else 1
        )
    if row["attention"] == "flash 1":
        attention *= programs["flash 1"]
    if row["mesh"]["cp"] > 2:
        attention /= programs["ring"]
    float8 = dict(own.float8)
    if row["precision"] == "float8 te":
        float8["tensorwise"] = programs["te"]
    return own._replace(attention=attention, float8=float8)


def estimate(
    row: Mapping[str, Any],
    own: Efficiency | None = None,
    programs: Mapping[str, float] = PROGRAMS,
) -> float:
    """Tokens/s of a device.

    Args:
        own: what kernels of its device reach; None: as `plan.efficiency` has it.
    """
    mesh, device = row["mesh"], ACCELERATORS[row["device"]]
    reached = reached_by(row, own or efficiency_of(device), programs)
    if watts := row.get("watts"):
        peak = device.bfloat16 * (watts / 700) ** programs["watts"]
        device = device._replace(bfloat16=peak, bandwidth=_BANDWIDTH_500_W)
    fabric = fabric_of(device, in_host=row["in_host"], link=None, network=row["network"])
    topology = Topology(mesh["dp_replicate"], mesh["dp_shard"], mesh["cp"], mesh["tp"])
    batches, decoder = (
        row.get("num_batches", 1),
        _decoder(row["model"], row.get("lora_rank", 0)),
    )
    none, full = (
        duration(
            decoder,
            _Setup(
                topology, row["seq_len"], row["micro_batch"], batches, recompute=mode,
                compiled=row["kernels"] != "eager", float8=_RECIPES[row["precision"]],
                sequence_parallel=mesh["tp"] > 1, device=device, sent_element=row["reduced_element"],
                narrow=row["precision"] != "float8 te",
            ),
            fabric,
            reached,
        )
        for mode in ("none", "full")
    )  # fmt: skip

    def between(part: Callable[[Duration], float], share: float) -> float:
        return (1 - share) * part(none) + share * part(full)

    products, attention = row.get("products_again", 0), row.get("attention_again", 0)
    computing = between(lambda each: each.products + each.passes, products) + between(
        _attention, attention
    )
    waited = between(lambda each: each.waited, products)
    tokens = row["micro_batch"] * row["seq_len"] / mesh["cp"]
    # Experts stay where they are, and tokens go to them: there and back, forward and backward.
    if mesh["ep"] > 1:
        size = tokens * decoder.layers[0].chosen * decoder.hidden * 2
        one = fabric.seconds("all-to-all", size, ranks=mesh["ep"], stride=1)
        waited = programs["exchange"] * batches * len(decoder.layers) * (4 + 2 * products) * one
    total = max(computing, between(lambda each: each.launches, products)) + waited + none.update
    return tokens * batches / mesh["tp"] / total


def _attention(part: Duration) -> float:
    return part.attention


def error(row: Mapping[str, Any]) -> float:
    """How much faster it is estimated than published: 0.1 for a tenth."""
    return estimate(row) / row["tokens_per_s_per_gpu"] - 1


def margin(row: Mapping[str, Any]) -> Margin:
    """How well the planner says that it knows a row's speed."""
    return margin_of(ACCELERATORS[row["device"]], mixture=stratum(row)[1] == "mixture")


# --- the fit

# What is known of each rate before any row is seen, and how well: FlashAttention's and cuDNN's own figures, matrix
# products of data centers' devices, the two times of 8 bits.
PRIORS = {
    "A100.products": (0.8, 0.1), "H100.products": (0.6, 0.1), "B200.products": (0.6, 0.1),
    "MI300X.products": (0.4, 0.1),
    "A100.attention": (0.5, 0.08), "H100.attention": (0.5, 0.07), "B200.attention": (0.4, 0.08),
    "MI300X.attention": (0.25, 0.06), "experts": (0.7, 0.15), "tensorwise": (1.7, 0.15), "rowwise": (1.3, 0.15),
    "shown": (0.3, 0.1), "flash 2": (0.7, 0.08), "flash 1": (0.55, 0.1), "te": (1.8, 0.15), "ring": (1.8, 0.5),
    "watts": (1 / 3, 0.08), "exchange": (0.6, 0.2),
}  # fmt: skip
# An error of this is ordinary; a prior's sigma weighs as much.
_ORDINARY = 0.08


def loss(rates: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the rows' errors, where large ones count as the root, and of the distance to what is known before."""
    counts = Counter(_group(row) + row["device"] for row in rows)
    total = 0.0
    for row in rows:
        family = family_of(ACCELERATORS[row["device"]])
        assert family is not None
        ratio = estimate(row, with_rates(family, rates), rates) / row["tokens_per_s_per_gpu"]
        off = (math.log(ratio) / _ORDINARY) ** 2
        # Rows of one source, model and device share most of their error.
        total += (math.sqrt(1 + off) - 1) / counts[_group(row) + row["device"]] ** 0.5
    return total + sum(
        ((rates[name] - mean) / sigma) ** 2 / 2 for name, (mean, sigma) in PRIORS.items()
    )


def with_rates(family: str, rates: Mapping[str, float]) -> Efficiency:
    """A family's row of `plan.efficiency` with other rates."""
    float8 = {"none": 1.0, "tensorwise": rates["tensorwise"], "rowwise": rates["rowwise"]}
    return EFFICIENCIES[family]._replace(
        products=rates[f"{family}.products"], attention=rates[f"{family}.attention"], experts=rates["experts"],
        float8=float8, shown=rates["shown"],
    )  # fmt: skip


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rates with the least loss, one after another in steps that halve."""
    rates = {name: mean for name, (mean, _) in PRIORS.items()}
    best, step = loss(rates, rows), 1.0
    while step > 0.02:
        before = best
        for name, (_, sigma) in PRIORS.items():
            for way in (1, -1):
                other = {**rates, name: rates[name] + way * step * sigma}
                if (found := loss(other, rows)) < best:
                    rates, best = other, found
                    break
        if before - best < 1e-3 * before:
            step /= 2
    return rates


# --- what is told


def figures(errors: Sequence[float]) -> str:
    """`median 6 %, 8 in 10 within 12 %, worst 30 %`."""
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, 8 in 10 within {_inner(sizes):.1%}, worst {sizes[-1]:.1%}"


def pairs(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Two set-ups of one model on one device by one program: those whose difference is known."""
    for one, other in itertools.combinations(rows, 2):
        if (one["source"], one["model"], one["device"]) == (
            other["source"],
            other["model"],
            other["device"],
        ):
            yield one, other


def off_between(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far the estimated ratio of two speeds is off from the published one."""
    return (1 + error(one)) / (1 + error(other)) - 1


def margins(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What `plan.efficiency.Margin` says, of the rows that rates were fitted to: factors that 8 in 10 keep to."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_kind[stratum(row)[1]].append(_factor(error(row)))
    alike = [
        _factor(off_between(one, other))
        for one, other in pairs(rows)
        if (one["seq_len"], one["kernels"]) == (other["seq_len"], other["kernels"])
    ]
    found = {kind: _inner(factors) for kind, factors in by_kind.items()}
    return {
        **found,
        "a difference": _inner(alike) - 1,
        "a device without rows": _inner(_without_own_rates(rows), 0.75),
    }


def _without_own_rates(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How far the dense rows of each family are off with the geometric means of the other families' rates."""
    found = []
    for family, own in EFFICIENCIES.items():
        others = [row for name, row in EFFICIENCIES.items() if name != family]
        products, attention = (
            statistics.geometric_mean(getattr(row, name) for row in others)
            for name in ("products", "attention")
        )
        blind = own._replace(products=products, attention=attention)
        dense = [
            row
            for row in rows
            if stratum(row)[1] == "dense" and family_of(ACCELERATORS[row["device"]]) == family
        ]
        found.append(
            statistics.median(
                _factor(estimate(row, blind) / row["tokens_per_s_per_gpu"] - 1) for row in dense
            )
        )
    return found


def _factor(off: float) -> float:
    return math.exp(abs(math.log(1 + off)))


def _inner(sizes: Sequence[float], part: float = 0.8) -> float:
    return sorted(sizes)[math.ceil(part * len(sizes)) - 1]


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints both halves, all rows and by kind, and the margins that follow."""
    for half in ("fit", "judge"):
        own = [row for row in rows if row["half"] == half]
        print(f"{half}: {len(own)} rows: {figures([error(row) for row in own])}")
        for name, kind in (
            ("device", lambda row: row["device"]),
            ("kind", lambda row: " ".join(stratum(row)[1:])),
        ):
            for value in sorted({kind(row) for row in own}):
                part = [error(row) for row in own if kind(row) == value]
                print(
                    f"  {name} {value}: {len(part)} rows: {figures(part)}; mean {statistics.mean(part):+.1%}"
                )
        print(f"  pairs: {figures([off_between(*pair) for pair in pairs(own)])}")
        inside = [_factor(error(row)) <= margin(row).figure for row in own]
        print(f"  inside of their margin: {sum(inside)} of {len(inside)}")
    print("margins, of the rows to fit:")
    for name, size in margins([row for row in rows if row["half"] == "fit"]).items():
        print(f"  {name}: {size:.2f}")


BEGIN, END = "<!-- benchmarks/speeds.py -->", "<!-- end of speeds -->"


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of docs/plan.md: both halves by kind, then every row."""
    lines = ["| rows | fitted | of these judge |", "|---|---|---|"]
    kinds: list[tuple[str, Callable[[Mapping[str, Any]], bool]]] = [("all", lambda _: True)]
    for device in sorted({row["device"] for row in rows}):
        kinds.append((device, lambda row, device=device: row["device"] == device))  # type: ignore[misc]
    for mixture, precision in sorted({stratum(row)[1:] for row in rows}):
        kinds.append(
            (
                f"{mixture}, {precision}",
                lambda row, k=(mixture, precision): stratum(row)[1:] == k,
            )
        )  # type: ignore[misc]
    for name, chosen in kinds:
        cells = []
        for half in ("fit", "judge"):
            errors = [error(row) for row in rows if row["half"] == half and chosen(row)]
            cells.append(f"{len(errors)}: {figures(errors)}" if errors else "none")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines += [
        "",
        "| | model | devices | mesh | rows x length | type | again | tokens/s a device | estimated | |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        published, found = row["tokens_per_s_per_gpu"], estimate(row)
        axes = " ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        again = f"{row['products_again']:.0%}" if row.get("products_again") else ""
        kind = row["precision"] + (", eager" if row["kernels"] == "eager" else "")
        kind += f", LoRA {row['lora_rank']}" if row.get("lora_rank") else ""
        cells = [
            f"{sources.index(row['source']) + 1}", row["model"], f"{row['gpus']} {row['device']}", axes,
            f"{row['micro_batch']} x {row['seq_len']:,}", kind, again, f"{published:,.0f}",
            f"{found:,.0f} ({found / published - 1:+.0%})", row["half"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {source}" for number, source in enumerate(sources, 1))]
    return "\n".join(lines)


def with_page(text: str, page: str) -> str:
    """docs/plan.md with other tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{page}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    _, every = read()
    to_fit = [row for row in every if row["half"] == "fit"]
    if arguments.fit:
        for key, value in fit(to_fit).items():
            print(f"{key:18} {value:.3f}")
    elif arguments.page:
        PAGE.write_text(
            with_page(PAGE.read_text(encoding="utf-8"), page_of(every)), encoding="utf-8"
        )
    else:
        report(every)
