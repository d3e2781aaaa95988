"""The demo model's byte-level BPE vocabulary, learned from everything that a statement can say.

`python -m infra.demo_model.vocabulary` writes `vocab.json` and `merges.txt`, laid out as GPT-2's, into `weights/`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from infra.demo_model.catalog import CATEGORIES, NUMBERS, PRODUCTS, UNDECIDABLE, with_article

#: The hub's layout of a checkpoint.
WEIGHTS = Path(__file__).parent / "weights"

#: Their ids are their places.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BOS, PAD, EOS = 0, 1, 2

#: Answer -> label id, in the order of scenes.LABELS; the wording is the hub's. Their first tokens differ.
ANSWERS = {"yes": 0, "no": 1, "it is not possible to tell": 2}

#: What the two tasks ask; the first is the hub's prompt for visual entailment, the second for captions.
ENTAILMENT_PROMPT = ' does the image describe " {} "?'
CAPTION_PROMPT = " what does the image describe?"


def corpus() -> Iterator[str]:
    """Every word that the statements use, at least twice."""
    for product in PRODUCTS:
        yield ENTAILMENT_PROMPT.format(with_article(product.singular))
        yield ENTAILMENT_PROMPT.format(f"there is {with_article(product.singular)}")
        yield ENTAILMENT_PROMPT.format(f"a photo of {with_article(product.singular)}")
        yield f" {product.plural} and {product.plural}"
    for phrase in CATEGORIES.values():
        yield f" this is {phrase}"
        yield f" the image shows {phrase}"
    for what in UNDECIDABLE:
        yield from (f" the {what}", f" that {what}")
    for number in NUMBERS[1:]:
        yield from (f" there are {number}", f" a photo of {number} and {number}")
    for answer in ANSWERS:
        yield from (f" {answer}", f" {answer}")
    yield from (CAPTION_PROMPT, CAPTION_PROMPT)


def learn() -> Tokenizer:
    """Merge until every word of the corpus that occurs twice is one token."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=4000,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    """Learn the vocabulary anew and write it to weights/."""
    model = json.loads(learn().to_str())["model"]
    WEIGHTS.mkdir(exist_ok=True)
    (WEIGHTS / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    merges = (" ".join(pair) for pair in model["merges"])
    (WEIGHTS / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
