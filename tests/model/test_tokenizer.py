"""Text to token ids."""

import json

import pytest

from tests.model.golden import GOLDEN
from worker.errors import CheckpointRefused
from worker.model.tokenizer import Tokenizer

VOCAB = json.loads((GOLDEN / "ofa_mini" / "vocab.json").read_text(encoding="utf-8"))
MERGES = (GOLDEN / "ofa_mini" / "merges.txt").read_text(encoding="utf-8")


def test_merges_are_applied_in_order() -> None:
    tokenizer = Tokenizer.from_hub(VOCAB, MERGES)

    assert tokenizer.encode(" the image") == [VOCAB["Ġthe"], VOCAB["Ġimage"]]
    assert tokenizer.encode(" bthe") == [VOCAB["Ġb"], VOCAB["the"]]


@pytest.mark.parametrize("text", ["中文", "😀", "\x00\x01", "\u200b", "ZÜ", "\ufffd"])
def test_every_text_has_tokens_and_none_is_unknown(text: str) -> None:
    ids = Tokenizer.from_hub(VOCAB, MERGES).encode(text)

    assert len(ids) == len(text.encode())
    assert VOCAB["<unk>"] not in ids


def test_a_merge_that_begins_with_a_hash_is_kept() -> None:
    vocab = {**VOCAB, "##": len(VOCAB)}

    assert Tokenizer.from_hub(vocab, "#version: 0.2\n# #\n").encode("##") == [len(VOCAB)]


@pytest.mark.parametrize("token", ["<s>", "<pad>", "</s>", "a", "Ġ", "Ã"])
def test_a_vocabulary_that_lacks_a_needed_token_is_refused(token: str) -> None:
    vocab = {key: value for key, value in VOCAB.items() if key != token}

    with pytest.raises(CheckpointRefused, match=f"vocab.json lacks the token '{token}'"):
        Tokenizer.from_hub(vocab, "")


@pytest.mark.parametrize("vocab", [["a"], {"a": "1"}, {"a": -1}, {"a": True}])
def test_a_vocabulary_that_is_none_is_refused(vocab: object) -> None:
    with pytest.raises(CheckpointRefused, match=r"vocab\.json is not an object of token to id"):
        Tokenizer.from_hub(vocab, MERGES)


@pytest.mark.parametrize("merges", ["a b c", "ab", "a  b"])
def test_merges_that_are_not_pairs_are_refused(merges: str) -> None:
    with pytest.raises(CheckpointRefused, match=r"merges\.txt has a line that is not two tokens"):
        Tokenizer.from_hub(VOCAB, merges)


def test_a_merge_into_an_unknown_token_is_refused() -> None:
    with pytest.raises(CheckpointRefused, match=r"vocab\.json lacks the token 'zq'"):
        Tokenizer.from_hub(VOCAB, "z q")
