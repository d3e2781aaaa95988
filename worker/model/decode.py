"""Scores of a closed set of answers after a prompt, in one pass of the decoder where their first tokens decide.

The decoder reads the prompt (the source without its end) and then an answer. At every token only those that continue
some answer are allowed, so an answer's log-probability is the sum, over the places where answers part, of the
log-softmax over the tokens allowed there; where one token alone is allowed it costs nothing. Probabilities are the
softmax of these sums. This is the reference's "traverse", which runs each answer through the whole vocabulary.

Answers whose first tokens all differ part only once, right after the prompt, and every pair's hidden state at that
one place is enough. Answers that share a prefix are walked as a trie: one row for each branch, all rows in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.model.ofa import OFA, Memory

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """A closed set of answers as a trie. Raises ValueError where two answers have the same tokens."""

    names: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # of each answer, without begin and end
    eos: int
    #: Where answers part: after each of these prefixes more than one token can follow.
    forks: dict[Prefix, tuple[int, ...]] = field(init=False)
    #: The shortest set of rows that passes through every fork.
    rows: tuple[Prefix, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.tokens)) != len(self.tokens) or not all(self.tokens):
            raise ValueError(f"the answers {', '.join(self.names)} have not each their own tokens")
        following: dict[Prefix, list[int]] = {}
        for tokens in self.tokens:
            sequence = (*tokens, self.eos)
            for place, token in enumerate(sequence):
                allowed = following.setdefault(sequence[:place], [])
                if token not in allowed:
                    allowed.append(token)
        forks = {prefix: tuple(allowed) for prefix, allowed in following.items() if len(allowed) > 1}
        # A fork on the way to a deeper one needs no row of its own, since the deeper row passes through it.
        rows = tuple(one for one in forks if not any(other != one and other[: len(one)] == one for other in forks))
        object.__setattr__(self, "forks", forks)
        object.__setattr__(self, "rows", rows or ((),))

    @property
    def depth(self) -> int:
        """Tokens of an answer that the decoder has to read, beyond the prompt."""
        return max(len(row) for row in self.rows)


@dataclass(frozen=True)
class Scores:
    """Scores of B pairs for A answers, in the answers' order."""

    log_probs: Tensor  # (B, A) float32, sums of log-probabilities
    probs: Tensor  # (B, A) float32, each row sums to 1


def score(model: OFA, ids: Tensor, memory: Memory, answers: Answers) -> Scores:
    """Score every answer for every pair: ids (B, L) as given to `encode`, its memory -> Scores.

    A pair's scores do not depend on the other rows.
    """
    lengths = ids.ne(model.config.pad_token_id).sum(1) - 1  # (B,), of the prompts: the source without its end
    log_probs = torch.zeros(len(ids), len(answers.names), dtype=torch.float32, device=ids.device)
    for fork, hidden in _hidden_at_forks(model, ids, lengths, memory, answers).items():
        allowed = answers.forks[fork]
        logits = model.logits(hidden, torch.tensor(allowed, device=ids.device))  # (B, len(allowed))
        choice = logits.float().log_softmax(-1)
        for answer, tokens in enumerate(answers.tokens):
            if tokens[: len(fork)] == fork:
                token = (*tokens, answers.eos)[len(fork)]
                log_probs[:, answer] += choice[:, allowed.index(token)]
    return Scores(log_probs, log_probs.softmax(-1))


def _hidden_at_forks(
    model: OFA, ids: Tensor, lengths: Tensor, memory: Memory, answers: Answers
) -> dict[Prefix, Tensor]:
    """The decoder's states (B, d) after the prompt and each fork's prefix."""
    pairs, rows = len(ids), len(answers.rows)
    each = torch.arange(pairs, device=ids.device)
    prompts = continue_prompts(ids, lengths, answers.rows, model.config.pad_token_id)  # (rows * B, T)
    if rows > 1:
        memory = memory.rows(each.repeat(rows))
    hidden = model.decode(prompts, memory)  # (rows * B, T, d)
    hidden = hidden.view(rows, pairs, *hidden.shape[1:])
    states = {}
    for fork in answers.forks:
        row = next(index for index, prefix in enumerate(answers.rows) if prefix[: len(fork)] == fork)
        states[fork] = hidden[row, each, lengths - 1 + len(fork)]
    return states


def continue_prompts(ids: Tensor, lengths: Tensor, rows: Sequence[Prefix], pad: int) -> Tensor:
    """Each prompt continued by each prefix: ids (B, L), lengths (B,) -> (len(rows) * B, T), padded on the right."""
    pairs, depth = len(ids), max(len(prefix) for prefix in rows)
    prompts = ids.new_full((len(rows), pairs, ids.size(1) + depth), pad)
    place = torch.arange(ids.size(1), device=ids.device)
    prompts[:, :, : ids.size(1)] = ids.masked_fill(place >= lengths[:, None], pad)
    each = torch.arange(pairs, device=ids.device)
    for row, prefix in enumerate(rows):
        for step, token in enumerate(prefix):
            prompts[row, each, lengths + step] = token
    # No prompt reaches the last place, which only the dropped end token made necessary.
    return prompts[:, :, :-1].flatten(0, 1)
