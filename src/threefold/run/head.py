"""The head of a run: what a start trains and what it has chosen, as fields. No torch.

Rank 0 prints its `lines` before the first step and writes its fields into the journal's start; the page of a run reads
the fields back. The prose is written here and is never parsed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.build_id import version
from threefold.errors import size_text
from threefold.jsonl import Values
from threefold.mesh.topology import Topology

_SIZES = {
    "layers": "layers",
    "hidden_size": "wide",
    "heads": "heads",
    "kv_heads": "kv heads",
    "vocabulary": "tokens in the vocabulary",
}

# Their texts begin below one another; the others have a colon after the name, or none.
_ALIGNED = (
    "model",
    "mesh",
    "data",
    "stored",
    "format",
    "bos",
    "eval",
    "shares",
    "dpo",
    "steps",
    "epochs",
    "lr",
    "hosts",
    "files",
)
_WITHOUT_COLON = ("", "resumed from", "restart")

Entry = tuple[str, str]
"""What, and how and why."""


@dataclass(frozen=True)
class Head:
    """What a start trains.

    Attributes:
        model: name, type (of random weights), dtype, parameters and the sizes in `_SIZES`, as far as they are known.
        mesh: dp_replicate, dp_shard, cp, tp; `device`, and `mesh_why`: why it is this mesh.
        data: source, tokenizer, rows (a sentence) and seq_len.
        stored: for data at an address, what the next steps read and fetch (`Ahead.facts`).
        labels: (source, format and trained tokens) of each source whose rows have labels.
        notes: (subject, text) of further facts about data and loss.
        first_step, last_step: the steps ahead; None: there are none.
        epochs: what epochs do with rows that fill no batch, in words.
        rate: the learning rate, and why.
        hosts: how many, and who can join them.
        choices: (what, why) of each automatic choice, of probes and of estimates.
        resumed: the checkpoint that it resumes from; `lost_bits`: why not bit for bit (None: it was not exact).
        changed: (key, text) of keys that have changed since, and of the effect on the rate.
        restart: (number, most, launcher) of a restart.
    """

    path: str
    model: Values
    mesh: Sequence[int]
    device: str
    mesh_why: str
    data: Values
    global_batch: int
    stored: Values | None = None
    labels: Sequence[Sequence[str]] = ()
    notes: Sequence[Sequence[str]] = ()
    first_step: int | None = None
    last_step: int | None = None
    epochs: str | None = None
    rate: Sequence[Any] = ()
    hosts: Sequence[Any] = ()
    choices: Sequence[Sequence[str]] = ()
    resumed: str | None = None
    lost_bits: Sequence[str] | None = None
    changed: Sequence[Sequence[str]] = ()
    restart: Sequence[Any] = ()
    version: str = field(default_factory=version)

    @classmethod
    def from_values(cls, values: Any) -> "Head | None":
        """The head in a line of a journal; None if it is not one."""
        try:
            head = cls(**values)
            list(head.entries())
        except (TypeError, ValueError, KeyError, AttributeError):
            return None
        return head

    def to_values(self) -> Values:
        """Plain values, ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The head as it is printed."""
        entries = (printed(name, text) for name, text in self.entries())
        return [f"threefold {self.version}  {self.path}", *entries]

    def entries(self) -> Iterator[Entry]:
        """(what, how and why), in the order of printing."""
        topology = Topology(*self.mesh)
        ranks = f"{topology.world_size} ranks" if topology.world_size > 1 else "1 process"
        yield "model", self._model()
        yield "mesh", f"{topology} on {ranks} ({self.device}): {self.mesh_why}"
        data = self.data
        yield (
            "data",
            f"{data['source']} ({data['tokenizer']}): {data['rows']}; {data['seq_len']} tokens a row",
        )
        if self.stored is not None:
            yield "stored", self._stored()
        for source, text in self.labels:
            yield "format", f"{source}: {text}" if source else text
        for name, text in self.notes:
            yield name, text
        if self.first_step is not None:
            yield (
                "steps",
                f"{self.first_step} to {self.last_step}, {self.global_batch} rows each",
            )
            if self.epochs is not None:
                yield "epochs", self.epochs
            rate, why = self.rate
            yield "lr", f"{rate:g}: {why}"
        if self.hosts:
            number, who = self.hosts
            yield "hosts", f"{number}: {who}"
        for name, why in self.choices:
            yield name, why
        yield from self._history()

    def _model(self) -> str:
        model = self.model
        origin = f"{model['type']}, " if model.get("type") else ""
        sizes = ", ".join(
            f"{model[key]:,} {word}"
            for key, word in _SIZES.items()
            if model.get(key) is not None
        )
        return f"{origin}{model['parameters']:,} parameters, {model['name']}, {model['dtype']}\n{sizes}"

    def _stored(self) -> str:
        facts = self.stored or {}
        fetched = size_text(facts["fetched_bytes_a_step"])
        return (
            f"{size_text(facts['bytes_a_step'])} a step of {facts['address']}, {facts['hit_rate']:.1%} of it expected "
            f"in the cache of {size_text(facts['cache_bytes'])} (the next {facts['steps']} steps): "
            f"a step of 1 s waits below {fetched}/s"
        )

    def _history(self) -> Iterator[Entry]:
        if self.resumed is not None:
            bits = ""
            if self.lost_bits is not None:
                bits = (
                    f", with other bits: {'; '.join(self.lost_bits)}"
                    if self.lost_bits
                    else ", bit for bit"
                )
            yield "resumed from", self.resumed + bits
        yield from ((name, text) for name, text in self.changed)
        if self.restart:
            number, most, launcher = self.restart
            yield (
                "restart",
                f"{number}"
                + (f" of {most}: a rank had failed" if most else f": by {launcher}"),
            )


def printed(name: str, text: str) -> str:
    """An entry of the head as it is printed."""
    if name in _ALIGNED:
        return f"  {name:6} {text}".replace("\n", "\n         ")
    if name in _WITHOUT_COLON:
        return f"  {name} {text}" if name else f"  {text}"
    return f"  {name}: {text}"
