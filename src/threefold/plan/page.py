"""One self-contained page of a plan: the set-ups by time and memory, and the first one's step moment by moment."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from threefold.plan.advise import Plan, Question, pareto, what_pays
from threefold.plan.peak import LINES, Moment, timeline

_WIDTH, _BAR, _HEIGHT = 760, 14, 260
_COLOURS = (
    "#4063a3",
    "#7b9acc",
    "#a9c0e0",
    "#c97b3c",
    "#d9a579",
    "#8fb08c",
    "#b0576b",
    "#c9a53c",
    "#6d8f9c",
    "#9c7fb0",
    "#777777",
    "#5a8f5a",
    "#aaaaaa",
)
_COLOUR_OF = dict(zip(LINES, _COLOURS, strict=True))
_MOST = 12
_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:60em}td,th{padding:2px 8px;text-align:left}text{font-size:11px}"
)


def page(question: Question, plans: Sequence[Plan], *, title: str) -> str:
    """HTML without anything from elsewhere."""
    first, *_ = plans
    moments = timeline(question.decoder, first.setup)
    legend = "".join(
        f'<tr><td style="background:{_COLOUR_OF[line]}">&nbsp;</td><td>{escape(line)}</td><td>{escape(formula)}</td>'
        f"<td>{escape(source)}</td></tr>"
        for line, (formula, source) in LINES.items()
    )
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in what_pays(question, plans))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>Estimated by threefold plan; docs/plan.md says how far it can be trusted.</p>"
        f"<h2>Set-ups by time</h2>{_bars(plans[:_MOST])}<h2>None faster and smaller</h2>{_bars(pareto(plans)[:_MOST])}"
        f"{paragraphs}<h2>A step of the first: {escape(_named(first))}</h2>{_moments(moments, first)}"
        f"<table><tr><th></th><th>line</th><th>formula</th><th>source</th></tr>{legend}</table></html>\n"
    )


def _named(plan: Plan) -> str:
    setup = plan.setup
    offload = ", cpu_offload" if setup.cpu_offload else ""
    return f"{setup.topology}, {setup.micro_batch} rows, checkpointing {setup.recompute}{offload}"


def _bars(plans: Sequence[Plan]) -> str:
    """Each plan's memory at its peak, line by line, beside its time."""
    most = max(
        (max(plan.memory_bytes, plan.setup.device.memory_bytes) for plan in plans if plan.setup.device), default=1
    )
    rows = []
    for number, plan in enumerate(plans):
        top = number * 2 * (_BAR + 4)
        told = f"{_named(plan)}: {plan.duration.total:.2f} s, {plan.memory_bytes / 2**30:.1f} GiB, MFU {plan.mfu:.1%}"
        rows.append(f'<text x="0" y="{top + 11}">{escape(told)}</text>')
        left = 0.0
        for line, size in plan.peak.lines.items():
            width = _WIDTH * size / most
            rows.append(
                f'<rect x="{left:.1f}" y="{top + 15}" width="{width:.1f}" height="{_BAR}" fill="{_COLOUR_OF[line]}">'
                f"<title>{escape(line)}: {size / 2**30:.2f} GiB</title></rect>"
            )
            left += width
    return f'<svg width="{_WIDTH}" height="{len(plans) * 2 * (_BAR + 4)}" role="img">{"".join(rows)}</svg>'


def _moments(moments: Sequence[Moment], plan: Plan) -> str:
    """What is held at each moment, stacked by line, and the device's memory."""
    assert plan.setup.device is not None
    there = plan.setup.device.memory_bytes
    most = max(there, *(moment.total for moment in moments))
    width, rows = _WIDTH / len(moments), []
    for number, moment in enumerate(moments):
        bottom = float(_HEIGHT)
        for line, size in moment.lines.items():
            height = _HEIGHT * size / most
            bottom -= height
            rows.append(
                f'<rect x="{number * width:.2f}" y="{bottom:.1f}" width="{width:.2f}" height="{height:.1f}" '
                f'fill="{_COLOUR_OF[line]}"><title>{escape(moment.name)}, {escape(line)}: {size / 2**30:.2f} GiB'
                "</title></rect>"
            )
    y = _HEIGHT * (1 - there / most)
    rows.append(f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b00" stroke-dasharray="4"/>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(rows)}</svg>'
