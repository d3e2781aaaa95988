"""The model agrees with the reference's recorded answers, however its pairs are batched."""

import random

import pytest
import torch

from tests.model.golden import SETS, TOLERANCE, loaded, prompts, recorded, reference, scored


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_token_ids_are_the_references(name: str) -> None:
    cases = recorded(name)["cases"]

    made = prompts(loaded(name), cases)

    assert [list(prompt.ids) for prompt in made] == [case["input_ids"] for case in cases]


def test_one_padded_batch_of_mixed_lengths_agrees_with_the_reference(name: str) -> None:
    cases = recorded(name)["cases"]
    assert len({len(case["input_ids"]) for case in cases}) > 5

    scores = scored(loaded(name), cases)

    torch.testing.assert_close(scores.log_probs, reference(cases, "log_probs"), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(scores.probs, reference(cases, "probs"), atol=TOLERANCE, rtol=0)
    best = [loaded(name).answers.names[index] for index in scores.probs.argmax(1)]
    assert best == [case["label"] for case in cases]


def test_a_shuffled_batch_agrees_with_the_reference(name: str) -> None:
    cases = random.Random(1).sample(recorded(name)["cases"], k=len(recorded(name)["cases"]))

    scores = scored(loaded(name), cases)

    torch.testing.assert_close(scores.log_probs, reference(cases, "log_probs"), atol=TOLERANCE, rtol=0)


def test_each_pair_alone_agrees_with_the_reference(name: str) -> None:
    for case in recorded(name)["cases"]:
        scores = scored(loaded(name), [case])

        torch.testing.assert_close(scores.log_probs, reference([case], "log_probs"), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(scores.probs, reference([case], "probs"), atol=TOLERANCE, rtol=0)
