"""Closed sets of answers: where they part, and that a pass over the prompt scores them as one run an answer would."""

import pytest
import torch

from tests.model.golden import TOLERANCE, Spy, encoded, loaded, recorded, scored
from worker.model.decode import Answers, continue_prompts, score

EOS = 2


def answers(*tokens: tuple[int, ...]) -> Answers:
    return Answers(tuple(f"answer {place}" for place in range(len(tokens))), tokens, EOS)


def test_answers_with_different_first_tokens_part_once_right_after_the_prompt() -> None:
    closed = answers((7,), (8,), (9, 10, 11))

    assert closed.forks == {(): (7, 8, 9)}
    assert closed.rows == ((),)
    assert closed.depth == 0


def test_answers_that_share_a_prefix_part_after_it() -> None:
    closed = answers((5, 6, 7), (5, 6, 8, 7), (5, 6, 8, 9))

    assert closed.forks == {(5, 6): (7, 8), (5, 6, 8): (7, 9)}
    assert closed.rows == ((5, 6, 8),)


def test_an_answer_that_begins_another_is_told_by_its_end() -> None:
    closed = answers((5,), (5, 6), (7,))

    assert closed.forks == {(): (5, 7), (5,): (EOS, 6)}


def test_two_answers_of_the_same_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="have not each their own tokens"):
        answers((5, 6), (5, 6))


def test_an_answer_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="have not each their own tokens"):
        answers((5, 6), ())


def test_prompts_lose_their_end_and_gain_each_prefix() -> None:
    ids = torch.tensor([[0, 4, 2, 1], [0, 4, 5, 2]])

    prompts = continue_prompts(ids, torch.tensor([2, 3]), ((), (8, 9)), pad=1)

    assert prompts.tolist() == [[0, 4, 1, 1, 1], [0, 4, 5, 1, 1], [0, 4, 8, 9, 1], [0, 4, 5, 8, 9]]


@torch.inference_mode()
def one_run_an_answer(case: dict[str, object], closed: Answers) -> list[float]:
    """The score by its definition: the decoder reads each answer, and each step is a softmax over what is allowed."""
    checkpoint = loaded()
    ids, memory = encoded(checkpoint, [case])
    prompt = [token for token in ids[0].tolist() if token not in (checkpoint.tokenizer.pad, checkpoint.tokenizer.eos)]
    sums = []
    for tokens in closed.tokens:
        hidden = checkpoint.model.decode(torch.tensor([[*prompt, *tokens]]), memory)
        logits = checkpoint.model.logits(hidden)[0, len(prompt) - 1 :]
        total = 0.0
        for step, token in enumerate((*tokens, EOS)):
            allowed = {(*other, EOS)[step] for other in closed.tokens if other[:step] == tokens[:step]}
            masked = torch.full_like(logits[step], -torch.inf)
            masked[list(allowed)] = logits[step][list(allowed)]
            total += masked.log_softmax(-1)[token].item()
        sums.append(total)
    return sums


@pytest.mark.parametrize(
    "closed",
    [
        answers((7,), (8,), (9, 10, 11)),
        answers((5,), (5, 6), (7,)),
        answers((5, 6), (5, 6, 7, 8), (5, 9), (11, 12, 13), (11, 12, 14, 15)),
    ],
    ids=["first tokens differ", "one begins another", "several branches"],
)
def test_one_pass_scores_as_one_run_an_answer_does(closed: Answers) -> None:
    cases = recorded("plain")["cases"][2:7]
    checkpoint = loaded()
    ids, memory = encoded(checkpoint, cases)

    with torch.inference_mode():
        scores = score(checkpoint.model, ids, memory, closed)

    expected = torch.tensor([one_run_an_answer(case, closed) for case in cases])
    torch.testing.assert_close(scores.log_probs, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(scores.probs.sum(1), torch.ones(len(cases)))


def test_the_decoder_runs_once_where_first_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = loaded("long_answers")
    decode = Spy(checkpoint.model.decode)
    monkeypatch.setattr(checkpoint.model, "decode", decode)

    scored(checkpoint, recorded("long_answers")["cases"])

    assert [rows for rows, _ in decode.shapes] == [len(recorded("long_answers")["cases"])]
