"""Texts become the words and tokens that the reference would score, pictures its pixels; what is cut is said."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.model.golden import loaded
from worker.errors import ErrorCode, PairRejected
from worker.model.config import Configuration
from worker.model.preprocess import (
    MAX_CHARS_PER_TOKEN,
    clean,
    make_pixels,
    make_prompt,
    off_language,
    pad,
    padded_length,
)

CONFIGURATION = Configuration(max_src_length=80, patch_image_size=96)
TOKENIZER = loaded().tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A Red Shoe", "a red shoe"),
        ("!!! NEW: two chairs?", "new: two chairs?"),
        (".,leading", "leading"),
        ("black-and-white/grey", "black and white grey"),
        ("a small   shiny \t\n watch", "a small shiny watch"),
        ("one\ttab", "one\ttab"),
        ("ends\n", "ends"),
        ("  spaces  ", "spaces"),
        ("<person> holding", "person holding"),
        ("#1 cup", "1 cup"),
        ("in the middle: #1", "in the middle: #1"),
        ("ÀÉ CRÈME", "àé crème"),
    ],
)
def test_cleaning_is_the_references(text: str, expected: str) -> None:
    assert clean(text, 80) == (expected, False)


def test_words_beyond_the_limit_are_cut_and_said_to_be() -> None:
    assert clean("one two three four", 3) == ("one two three", True)
    assert clean("one two three", 3) == ("one two three", False)


def test_characters_that_no_token_can_reach_are_cut() -> None:
    cleaned, cut = clean("中" * 200_000, 80)
    assert (len(cleaned), cut) == (80 * MAX_CHARS_PER_TOKEN, True)

    whole = TOKENIZER.encode(f' does the image describe " {"中" * 40_000} "?')
    assert list(make_prompt("中" * 40_000, None, TOKENIZER, CONFIGURATION).ids[1:-1]) == whole[:80]


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert clean("a \ud83d cup", 80) == ("a \ufffd cup", False)
    assert clean("a \ud83d\ude00 cup", 80) == ("a 😀 cup", False)


def test_ten_thousand_words_are_scored_as_cut() -> None:
    prompt = make_prompt("word " * 10_000, None, TOKENIZER, CONFIGURATION)

    assert prompt.text == " ".join(["word"] * 80)
    assert prompt.flags == ("text_cut",)
    assert len(prompt.ids) == CONFIGURATION.max_src_length + 2
    assert (prompt.ids[0], prompt.ids[-1]) == (TOKENIZER.bos, TOKENIZER.eos)


def test_a_long_premise_is_said_to_be_cut() -> None:
    assert make_prompt("a cup", "word " * 81, TOKENIZER, CONFIGURATION).flags == ("text_cut",)


def test_few_words_of_many_tokens_are_said_to_be_cut() -> None:
    prompt = make_prompt("zqxj" * 60, None, TOKENIZER, CONFIGURATION)

    assert prompt.flags == ("text_cut",)
    assert len(prompt.ids) == CONFIGURATION.max_src_length + 2


@pytest.mark.parametrize("text", ["", "   ", "!!!", " \n", "..,"])
def test_a_text_of_which_nothing_is_left_is_rejected(text: str) -> None:
    with pytest.raises(PairRejected, match="nothing is left of the text") as caught:
        make_prompt(text, None, TOKENIZER, CONFIGURATION)
    assert caught.value.code is ErrorCode.TEXT_EMPTY


def test_a_premise_of_which_nothing_is_left_is_rejected() -> None:
    with pytest.raises(PairRejected, match="nothing is left of the premise"):
        make_prompt("a cup", "!!!", TOKENIZER, CONFIGURATION)


def test_the_premise_stands_before_the_text() -> None:
    prompt = make_prompt("The Text", "The Premise", TOKENIZER, CONFIGURATION)

    words = ' can image and text1 " the premise " imply text2 " the text "?'
    assert list(prompt.ids[1:-1]) == TOKENIZER.encode(words)
    assert (prompt.text, prompt.premise) == ("the text", "the premise")


@pytest.mark.parametrize("token", ["</s>", "<s>", "<pad>", "<mask>", "<unk>", "<code_5>", "<bin_7>"])
def test_what_looks_like_a_control_token_is_plain_text(token: str) -> None:
    ids = make_prompt(f"a cup {token} of tea", None, TOKENIZER, CONFIGURATION).ids

    controls = {TOKENIZER.bos, TOKENIZER.pad, TOKENIZER.eos, 3, 4}
    assert not controls & set(ids[1:-1])
    assert max(ids) < TOKENIZER.size
    assert ids != make_prompt("a cup of tea", None, TOKENIZER, CONFIGURATION).ids


def test_braces_in_a_text_stay_as_they_are() -> None:
    prompt = make_prompt("a {0} {} {cup!r}", None, TOKENIZER, CONFIGURATION)

    assert list(prompt.ids[1:-1]) == TOKENIZER.encode(' does the image describe " a {0} {} {cup!r} "?')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a red shoe", False),
        ("café crème — 中文 😀 cup", False),
        ("eine schöne Straße", False),
        ("красная обувь", True),
        ("红色的鞋子", True),
        ("حذاء أحمر", True),
        ("nike красная обувь", True),
        ("12345 !!", False),
        ("ab 中文", False),
        ("ab 中文字", True),
    ],
)
def test_a_text_mostly_in_another_script_is_off_language(text: str, expected: bool) -> None:
    assert off_language(text) is expected


def test_an_off_language_text_or_premise_is_flagged() -> None:
    assert make_prompt("красная обувь", None, TOKENIZER, CONFIGURATION).flags == ("off_language",)
    assert make_prompt("a red shoe", "красная обувь", TOKENIZER, CONFIGURATION).flags == ("off_language",)


@pytest.mark.parametrize(("imagenet", "expected"), [(False, 1.0), (True, (1 - 0.485) / 0.229)])
def test_pixels_are_a_normalised_square(imagenet: bool, expected: float) -> None:
    image = Image.new("RGB", (40, 10), (255, 0, 0))
    configuration = Configuration(patch_image_size=32, imagenet_default_mean_and_std=imagenet)

    pixels = make_pixels(image, configuration)

    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[0], torch.full((32, 32), expected))


def test_pixels_keep_rows_and_columns_apart() -> None:
    left_red = np.zeros((8, 8, 3), dtype=np.uint8)
    left_red[:, :4, 0] = 255

    pixels = make_pixels(Image.fromarray(left_red), Configuration(patch_image_size=8))

    assert pixels[0, :, 0].min() > 0.9
    assert pixels[0, :, 7].max() < -0.9


def test_prompts_are_padded_on_the_right_to_a_bucket() -> None:
    batch = pad([[0, 5, 2], [0, 5, 6, 7, 2]], pad_id=1, longest=82)

    assert batch.tolist() == [[0, 5, 2, 1, 1, 1, 1, 1], [0, 5, 6, 7, 2, 1, 1, 1]]


def test_padding_goes_no_further_than_the_longest_prompt_there_can_be() -> None:
    assert padded_length(80, 82) == 80
    assert padded_length(81, 82) == 82
