"""Reuse without a line: what makes content equal, whose answer is whose, and what a database that is away holds up."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import torch
from PIL import Image

from db.engine import make_engine
from db.originals import REUSED
from tasks.reuse import answered, content_hash, reuse, share
from tasks.settling import Case, MadeBy, Picture
from worker.decode_image import DecodedImage
from worker.errors import ErrorCode, Hold, TryLater
from worker.messages import Message, Pair
from worker.model.config import Configuration
from worker.model.preprocess import Prompt
from worker.moderator import Judgement, Prepared, Question

PICTURE = Image.new("RGB", (8, 8))
MADE_BY = MadeBy(1, "5ha", "fp32", Configuration(), {"yes": "entailment", "no": "contradiction"})
SAID = Judgement("entailment", "yes", {"yes": 0.9, "no": 0.1}, 0.9, 0.1, 0.0, "a shoe", None, (), 7, 16)
NOWHERE = make_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")


def case(*, fresh: bool = False, decoded: dict[str, Any] | None = None, **prompt: Any) -> Case:
    """A case that is ready for the model."""
    pair = Pair(id=uuid4(), image="s3://shop/1.jpg", text="A shoe")
    message = Message(uuid4(), datetime.now(UTC), (pair,), fresh=fresh)
    image = DecodedImage(PICTURE, b"sha of the file", 8, 8, "exact", ())
    asked = Prompt(**{"ids": (0, 5, 2), "text": "a shoe", "premise": None, "flags": (), **prompt})
    prepared = Prepared(Question(PICTURE, b"key", pair.text), asked, torch.zeros(3, 8, 8, dtype=torch.uint8))
    one = Case(message, pair, Picture(replace(image, **(decoded or {})), "etag"), prepared)
    one.content_hash = content_hash(one, MADE_BY)
    return one


def test_what_does_not_touch_the_scores_does_not_touch_the_hash() -> None:
    first = case()
    second = case(fresh=True, text="a  shoe", flags=("off_language",), decoded={"flags": ("first_frame",)})
    assert first.content_hash == second.content_hash
    assert len(content_hash(first, MADE_BY)) == 16
    assert content_hash(first, replace(MADE_BY, model_version_id=2)) == first.content_hash


@pytest.mark.parametrize(
    "other",
    [
        lambda: (case(ids=(0, 6, 2)), MADE_BY),
        lambda: (case(decoded={"sha256": b"sha of another"}), MADE_BY),
        lambda: (case(decoded={"decode_mode": "reduced"}), MADE_BY),
        lambda: (case(), replace(MADE_BY, weights_sha256="6ha")),
        lambda: (case(), replace(MADE_BY, recipe="awq-int4")),
        lambda: (case(), replace(MADE_BY, labels={"yes": "contradiction", "no": "entailment"})),
        lambda: (case(), replace(MADE_BY, configuration=Configuration(plain_prompt="is it {}?"))),
        lambda: (case(), replace(MADE_BY, configuration=Configuration(patch_image_size=64))),
        lambda: (case(), replace(MADE_BY, configuration=Configuration(imagenet_default_mean_and_std=True))),
    ],
    ids=["tokens", "picture", "decoding", "weights", "recipe", "labels", "prompt", "size", "normalisation"],
)
def test_whatever_the_scores_depend_on_is_in_the_hash(other: Callable[[], tuple[Case, MadeBy]]) -> None:
    assert content_hash(*other()) != case().content_hash


def test_a_taken_over_answer_keeps_the_scores_and_has_the_pairs_own_words_and_flags() -> None:
    mine = answered(case(text="ein schuh", premise="p", flags=("off_language",)), SAID)
    assert mine == replace(
        SAID, text_scored="ein schuh", premise_scored="p", flags=("off_language", REUSED), tokens=0, padded_tokens=0
    )


def test_repeats_are_answered_as_their_like_and_fail_with_it() -> None:
    asked, other = case(), case(ids=(0, 9, 2))
    repeats = [case(flags=("text_cut",)), case(ids=(0, 9, 2)), case()]
    asked.answer, other.answer = SAID, TryLater(ErrorCode.MODEL_FAILED, "it raised")
    share(repeats, [asked, other])
    first, second, third = [one.answer for one in repeats]
    assert isinstance(first, Judgement)
    assert (first.flags, first.tokens) == (("text_cut", REUSED), 0)
    assert second is other.answer
    assert isinstance(third, Judgement)
    assert third.flags == (REUSED,)


def test_with_the_setting_at_0_the_model_is_asked_every_pair_and_the_database_nothing() -> None:
    cases = [case(), case(), case(fresh=True)]
    assert reuse(cases, 0, NOWHERE, MADE_BY, lambda: False) == cases


def test_what_is_to_be_fresh_is_always_asked_and_the_database_nothing() -> None:
    cases = [case(fresh=True), case(fresh=True)]
    assert reuse(cases, 7, NOWHERE, MADE_BY, lambda: False) == cases


def test_a_database_that_is_away_is_waited_for_until_the_worker_stops() -> None:
    with pytest.raises(Hold):
        reuse([case()], 7, NOWHERE, MADE_BY, lambda: True)
