"""The demo model's data: what is drawn is what was drawn when the model was trained and measured."""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from infra.demo_model.catalog import CATEGORIES, PRODUCTS, PROHIBITED, counted, with_article
from infra.demo_model.emoji import GLYPH_SIDE_PX, GLYPHS, read_glyph
from infra.demo_model.evaluate import accuracies, judge
from infra.demo_model.generate import SHA256, digest, held_out_pairs
from infra.demo_model.scenes import KINDS, LABELS, SEEDS, SIDE_PX, caption, scene_at, state
from infra.demo_model.train import Tokens, as_pixels
from infra.demo_model.vocabulary import ANSWERS, CAPTION_PROMPT, ENTAILMENT_PROMPT, WEIGHTS, learn
from worker.model.checkpoint import MANIFEST, SAFETENSORS, SETTINGS, load
from worker.model.preprocess import make_pixels, make_prompt

FOLDER = WEIGHTS.parent

#: What the repository and a download carry at most.
MAX_WEIGHTS_BYTES, MAX_PICTURES_BYTES = 12_000_000, 3_000_000


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, object]]:
    lines = (FOLDER / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_train_development_and_test_scenes_share_no_picture() -> None:
    assert len(set(SEEDS.values())) == 3
    pictures = [{scene_at(seed, i)[0].pixels.tobytes() for i in range(100)} for seed in SEEDS.values()]
    assert len(set.union(*pictures)) == 300


def test_a_scene_depends_on_its_seed_and_index_alone() -> None:
    alone = scene_at(SEEDS["test"], 7)[0]
    scene_at(SEEDS["test"], 6)
    again = scene_at(SEEDS["test"], 7)[0]
    assert np.array_equal(alone.pixels, again.pixels)
    assert (alone.products, alone.centres) == (again.products, again.centres)
    assert alone.pixels.shape == (SIDE_PX, SIDE_PX, 3)


@pytest.mark.parametrize("policy", ["catalog", "prohibited"])
def test_statements_are_true_false_or_undecidable_as_labelled(policy: str) -> None:
    for index in range(200):
        scene, rng = scene_at(SEEDS["development"], index, prohibited=True)
        shown = [PRODUCTS[i] for i in scene.products]
        true = {counted(product, shown.count(product)) for product in shown}
        true |= {with_article(product.singular) for product in shown}
        true |= {CATEGORIES[product.category] for product in shown}
        for label in LABELS[:2]:
            claim = state(rng, scene, label, policy)
            said = [phrase for phrase in true if f" {claim.text}".endswith(f" {phrase}")]
            assert bool(said) == (label == "entailment"), (claim, true)
            assert policy == "catalog" or claim.category in PROHIBITED
        assert state(rng, scene, "neutral", policy).kind == "undecidable"


def test_the_first_pairs_of_the_test_scenes_are_the_known_ones() -> None:
    pairs = list(held_out_pairs(60))
    assert digest(pairs) == SHA256[60]
    # A digest that ignored a pixel or a word would prove nothing.
    pairs[0].pixels[0, 0, 0] ^= 1
    assert digest(pairs) != SHA256[60]


def test_the_held_out_pairs_are_the_first_600_test_pairs(heldout: list[dict[str, object]]) -> None:
    assert heldout == [pair.line for pair in held_out_pairs(600)]


def test_held_out_labels_come_in_thirds_and_a_fifth_is_the_prohibited_policys(heldout: list[dict[str, object]]) -> None:
    assert Counter(pair["label"] for pair in heldout) == dict.fromkeys(LABELS, 200)
    policies = Counter(pair["policy"] for pair in heldout)
    assert policies == {"catalog": 480, "prohibited": 120}
    decided = Counter((pair["policy"], pair["label"]) for pair in heldout if pair["policy"] == "prohibited")
    assert set(decided.values()) == {60}
    assert len({pair["id"] for pair in heldout}) == len({pair["ref"] for pair in heldout}) == 600


def test_the_held_out_pairs_show_every_kind_and_every_prohibited_category(heldout: list[dict[str, object]]) -> None:
    attributes = [pair["attributes"] for pair in heldout]
    assert all(isinstance(values, dict) and set(values) == {"category", "seller", "kind"} for values in attributes)
    values = set(chain.from_iterable(value.values() for value in attributes if isinstance(value, dict)))
    assert values >= set(KINDS) | set(PROHIBITED)


def test_the_held_out_pictures_are_the_drawn_ones() -> None:
    for pair in held_out_pairs(600):
        path = FOLDER / pair.line["image"]
        with Image.open(path) as picture:
            assert np.array_equal(np.asarray(picture), pair.pixels), path
    sizes = [path.stat().st_size for path in (FOLDER / "pictures").iterdir()]
    assert len(sizes) == 200
    assert sum(sizes) < MAX_PICTURES_BYTES


def test_every_product_has_its_picture_and_the_licence_lies_beside() -> None:
    assert len(PRODUCTS) == 43 and {product.category for product in PRODUCTS} == set(CATEGORIES)
    assert all(read_glyph(product).size == (GLYPH_SIDE_PX, GLYPH_SIDE_PX) for product in PRODUCTS)
    assert len(list(GLYPHS.glob("*.png"))) == len(PRODUCTS)
    assert "SIL OPEN FONT LICENSE" in (GLYPHS / "OFL.txt").read_text(encoding="utf-8")


def test_the_vocabulary_is_the_one_that_the_corpus_gives_and_holds_every_word() -> None:
    vocab = json.loads((WEIGHTS / "vocab.json").read_text(encoding="utf-8"))
    tokenizer = learn()
    assert tokenizer.get_vocab() == vocab
    texts = [ENTAILMENT_PROMPT.format(pair.line["text"]) for pair in held_out_pairs(600)]
    texts += [CAPTION_PROMPT, f" {caption(scene_at(SEEDS['test'], 0)[0])}"]
    assert all(token.startswith("Ġ") for text in texts for token in tokenizer.encode(text).tokens if token != "?")
    assert len({tokenizer.encode(f" {answer}").ids[0] for answer in ANSWERS}) == len(ANSWERS)


def test_the_weights_are_small_and_complete() -> None:
    files = {SAFETENSORS, MANIFEST, *SETTINGS, "ans2label.json", "README.md"}
    assert {path.name for path in WEIGHTS.iterdir()} == files
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= MAX_WEIGHTS_BYTES
    assert json.loads((WEIGHTS / "ans2label.json").read_text(encoding="utf-8")) == ANSWERS


def test_training_reads_texts_and_pictures_as_scoring_does() -> None:
    checkpoint, tokens = load(WEIGHTS), Tokens(WEIGHTS)
    for pair in held_out_pairs(300):
        prompt = make_prompt(pair.line["text"], None, checkpoint.tokenizer, checkpoint.configuration)
        assert list(prompt.ids) == tokens.encode(ENTAILMENT_PROMPT.format(pair.line["text"]))
    scene = scene_at(SEEDS["development"], 0)[0]
    scored = make_pixels(Image.fromarray(scene.pixels), checkpoint.configuration)
    assert np.allclose(scored, as_pixels([scene])[0], atol=1e-6)
    assert checkpoint.answers.tokens == tuple(tuple(tokens.encode(f" {answer}")[1:-1]) for answer in ANSWERS)
    assert checkpoint.labels == LABELS


def test_the_weights_judge_nine_of_ten_pairs_of_every_label_rightly() -> None:
    pairs = list(held_out_pairs(300))
    counts = accuracies(pairs, judge(WEIGHTS, pairs))
    assert {label: counts[label][0] / counts[label][1] >= 0.9 for label in LABELS} == dict.fromkeys(LABELS, True)
