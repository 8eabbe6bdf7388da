"""Scores of texts by the model on the mesh, and its adapter for lm-evaluation-harness.

All dp ranks take their share of the same batches, so that each computes as often as the others, and exchange one
number and one flag per request.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.errors import ConfigError
from threefold.model.model import Model

# float32 logits of the rows that are computed at one time.
_MOST_BYTES = 256 * 2**20
# (tokens of a context, tokens of its continuation)
Request = tuple[Sequence[int], Sequence[int]]


class Scores:
    """(log-probability of the continuation, whether it is what the model would write greedily) of each request."""

    def __init__(self, model: Model, longest: int) -> None:
        """Args: longest: tokens that the model takes; more are cut off at the left, as the harness does."""
        self._model, self.longest = model, longest
        self.tick: Any = lambda: None

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Every rank calls it, with the same requests; all get the same.

        Raises:
            ConfigError: a continuation is longer than what the model takes.
        """
        if (
            most := max((len(continuation) for _, continuation in requests), default=0)
        ) > self.longest:
            raise ConfigError(
                f"a task of eval.tasks scores a text of {most:,} tokens, but the model takes {self.longest:,}",
                expected="texts that fit into the model whole",
                fix="leave the task out",
            )
        model, mesh = self._model, self._model.mesh
        order = sorted(
            range(len(requests)), key=lambda number: -sum(map(len, requests[number]))
        )
        scores = torch.zeros(len(requests), 2, dtype=torch.float64, device=mesh.device)
        with model.evaluating():
            for batch in self._batches(order, requests):
                own = batch[mesh.dp_rank :: mesh.dp_size]
                scored = self._of(
                    [requests[number] for number in own or batch[:1]],
                    self._length(requests[batch[0]]),
                )
                if own:
                    scores[own] = scored
                self.tick()
        mesh.all_reduce("dp", scores)
        return [(value, greedy > 0.5) for value, greedy in scores.tolist()]

    def _length(self, request: Request) -> int:
        """Places of a row that has it, as the mesh can split them."""
        mesh = self._model.mesh
        unit = 2 * mesh.cp_size * mesh.tp_size if mesh.cp_size * mesh.tp_size > 1 else 1
        return max(unit, -(-min(self.longest, sum(map(len, request)) - 1) // unit) * unit)

    def _batches(
        self, order: Sequence[int], requests: Sequence[Request]
    ) -> Iterator[Sequence[int]]:
        """The requests of all dp ranks, the longest first: as many rows as their logits allow."""
        at, size = 0, self._model.mesh.dp_size
        vocabulary = (
            self._model.architecture.get_text_config().vocab_size
            if self._model.architecture
            else 1
        )
        while at < len(order):
            rows = max(1, _MOST_BYTES // (4 * vocabulary * self._length(requests[order[at]])))
            yield order[at : at + rows * size]
            at += rows * size

    def _of(self, requests: Sequence[Request], length: int) -> Tensor:
        """[requests, 2] float64 of requests of this dp rank; all ranks of its cp and tp compute them together."""
        ids = torch.zeros(len(requests), length, dtype=torch.int64)
        for row, (context, continuation) in enumerate(requests):
            taken = [*context, *continuation][-(self.longest + 1) : -1]
            ids[row, : len(taken)] = torch.tensor(taken)
        logits = self._model(input_ids=ids)
        scores = torch.zeros(len(requests), 2, dtype=torch.float64, device=logits.device)
        for row, (context, continuation) in enumerate(requests):
            end = min(self.longest, len(context) + len(continuation) - 1)
            targets = torch.tensor(continuation, device=logits.device)
            values = logits[row, end - len(targets) : end].log_softmax(-1)
            scores[row, 0] = values.gather(-1, targets[:, None]).sum()
            scores[row, 1] = (values.argmax(-1) == targets).all()
        return scores


def harness_of(scores: Scores, tokenizer: Any) -> Any:
    """The model as the harness sees one."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    begin = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    )

    class OnMesh(TemplateLM):
        backend = "causal"

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return int(begin)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids: list[int] = tokenizer.encode(string, add_special_tokens=False)
            return ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(
            self, requests: Any, disable_tqdm: bool = False
        ) -> list[float]:
            windows, counts = [], []
            for (text,) in (request.args for request in requests):
                tokens = self.tok_encode(text)
                rolling = utils.get_rolling_token_windows(
                    tokens, self.prefix_token_id, scores.longest, context_len=1
                )
                own = [utils.make_disjoint_window(each) for each in rolling]
                windows += own
                counts.append(len(own))
            scored = iter(scores(windows))
            return [math.fsum(next(scored)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise ConfigError(
                "a task asks for generated text",
                expected="tasks scored by probability",
                fix="leave it out",
            )

    return OnMesh()
