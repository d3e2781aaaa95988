"""Catalog scenes and statements about them, each a pure function of (seed, index).

A scene is one to three product pictures, tinted, mirrored, rotated and pasted on a gradient. A statement about it
is true (`entailment`), false (`contradiction`) or about something that no picture shows (`neutral`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import hypot
from typing import TypeVar

import numpy as np
from numpy.random import Generator
from PIL import Image

from infra.demo_model.catalog import (
    CATEGORIES,
    PRODUCTS,
    PROHIBITED,
    UNDECIDABLE,
    Product,
    counted,
    with_article,
)
from infra.demo_model.emoji import read_glyph

#: A scene's width and height.
SIDE_PX = 64

#: Most products in a scene.
MAX_PRODUCTS = 3

#: How many scenes of ten show one, two, three products.
COUNT_TENTHS = (4, 3, 3)

#: Radius of a product's picture as a share of the side: alone, and beside others.
RADIUS_ALONE = (0.32, 0.45)
RADIUS_BESIDE = (0.20, 0.26)

#: Rotations that are drawn.
ROTATIONS_DEGREES = (-20, -15, -10, -5, 0, 5, 10, 15, 20)

#: Standard deviation of the pixels' noise, of 255.
NOISE = 4.0

LABELS = ("entailment", "contradiction", "neutral")
KINDS = ("name", "category", "count", "undecidable")

#: The train, development and test scenes: disjoint because a scene's generator is seeded with (seed, index).
SEEDS = {"train": 11, "development": 12, "test": 13}

T = TypeVar("T")

PROHIBITED_PRODUCTS = tuple(i for i, product in enumerate(PRODUCTS) if product.category in PROHIBITED)


@dataclass(frozen=True)
class Scene:
    """`pixels` (SIDE_PX, SIDE_PX, 3) uint8; `products` indices into PRODUCTS; `centres` their (x, y) in pixels."""

    pixels: np.ndarray
    products: tuple[int, ...]
    centres: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Statement:
    """One claim about a scene; `category` is that of the product or of the claim."""

    text: str
    label: str
    kind: str
    policy: str
    category: str


@cache
def _glyph(product: int, mirrored: bool, degrees: int) -> Image.Image:
    glyph = read_glyph(PRODUCTS[product])
    if mirrored:
        glyph = glyph.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return glyph.rotate(degrees, Image.Resampling.BILINEAR, expand=True)


@lru_cache(maxsize=40_000)
def _sized_glyph(product: int, mirrored: bool, degrees: int, side_px: int) -> np.ndarray:
    return np.asarray(_glyph(product, mirrored, degrees).resize((side_px, side_px), Image.Resampling.BILINEAR))


def _between(rng: Generator, low: float, high: float) -> float:
    return low + (high - low) * float(rng.random())


def _arrangement(rng: Generator, wanted: int) -> list[tuple[float, float, float]]:
    """Up to `wanted` circles (x, y, radius) in pixels that hardly touch; at least one."""
    radii = RADIUS_ALONE if wanted == 1 else RADIUS_BESIDE
    circles: list[tuple[float, float, float]] = []
    for _ in range(wanted):
        for _ in range(30):
            r = _between(rng, *radii) * SIDE_PX
            x, y = _between(rng, r, SIDE_PX - r), _between(rng, r, SIDE_PX - r)
            if all(hypot(x - u, y - v) > 0.92 * (r + q) for u, v, q in circles):
                circles.append((x, y, r))
                break
    return circles


def _choose_products(rng: Generator, count: int, prohibited: bool) -> list[int]:
    products = [int(i) for i in rng.integers(0, len(PRODUCTS), count)]
    if prohibited:
        products[0] = PROHIBITED_PRODUCTS[rng.integers(len(PROHIBITED_PRODUCTS))]
    # Repeats are what makes counting necessary: some scenes show one product twice or thrice.
    if rng.random() < 0.7:
        products[1:] = [products[0] if rng.random() < 0.7 else i for i in products[1:]]
    return products


def draw_scene(rng: Generator, prohibited: bool = False) -> Scene:
    """Draw one scene; `prohibited` puts a product of a prohibited category into it."""
    wanted = int(np.searchsorted(np.cumsum(COUNT_TENTHS), rng.integers(sum(COUNT_TENTHS)), side="right")) + 1
    circles = _arrangement(rng, wanted)
    products = _choose_products(rng, len(circles), prohibited)
    top, bottom = rng.integers(60, 255, (2, 3))
    slope = np.linspace(0.0, 1.0, SIDE_PX, dtype=np.float32)[:, None, None]
    canvas = np.repeat(top * (1 - slope) + bottom * slope, SIDE_PX, axis=1).astype(np.float32)
    for product, (x, y, radius) in zip(products, circles, strict=True):
        side = int(2 * radius)
        degrees = ROTATIONS_DEGREES[rng.integers(len(ROTATIONS_DEGREES))]
        glyph = _sized_glyph(product, bool(rng.integers(2)), degrees, side).astype(np.float32)
        tint = 0.85 + 0.25 * rng.random(3, dtype=np.float32)
        left, upper = int(x - radius), int(y - radius)
        under = canvas[upper : upper + side, left : left + side]
        alpha = glyph[..., 3:] / 255
        under += alpha * (np.minimum(glyph[..., :3] * tint, 255) - under)
    light = 0.8 + 0.35 * rng.random(dtype=np.float32)
    noisy = canvas * light + NOISE * rng.standard_normal(canvas.shape, dtype=np.float32)
    pixels = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    return Scene(pixels, tuple(products), tuple((x, y) for x, y, _ in circles))


def _pick(rng: Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def _of_category(rng: Generator, category: str) -> str:
    templates = ("{}", "this is {}", "the image shows {}", "a photo of {}")
    return _pick(rng, templates).format(CATEGORIES[category])


def _neutral(rng: Generator, product: Product) -> Statement:
    what = _pick(rng, UNDECIDABLE)
    text = _pick(rng, (f"the {product.singular} {what}", f"{with_article(product.singular)} that {what}"))
    return Statement(text, "neutral", "undecidable", "catalog", product.category)


def _count(rng: Generator, scene: Scene, label: str) -> Statement:
    shown = _pick(rng, scene.products)
    count = scene.products.count(shown)
    if label == "contradiction":
        count = _pick(rng, [other for other in range(1, MAX_PRODUCTS + 1) if other != count])
    product = PRODUCTS[shown]
    text = _pick(rng, ("{}", "there {be} {}", "a photo of {}"))
    text = text.format(counted(product, count), be="is" if count == 1 else "are")
    return Statement(text, label, "count", "catalog", product.category)


def _category(rng: Generator, scene: Scene, label: str, policy: str) -> Statement:
    shown = {PRODUCTS[i].category for i in scene.products}
    asked = PROHIBITED if policy == "prohibited" else tuple(CATEGORIES)
    if label == "entailment":
        category = _pick(rng, [PRODUCTS[i].category for i in scene.products if PRODUCTS[i].category in asked])
    else:
        category = _pick(rng, [name for name in asked if name not in shown])
    return Statement(_of_category(rng, category), label, "category", policy, category)


def _name(rng: Generator, scene: Scene, label: str) -> Statement:
    if label == "entailment":
        product = PRODUCTS[_pick(rng, scene.products)]
    else:
        product = _pick(rng, [other for i, other in enumerate(PRODUCTS) if i not in scene.products])
    text = _pick(rng, ("{}", "a photo of {}", "there is {}")).format(with_article(product.singular))
    return Statement(text, label, "name", "catalog", product.category)


def state(rng: Generator, scene: Scene, label: str, policy: str = "catalog") -> Statement:
    """A statement with this label about the scene.

    An `entailment` under the `prohibited` policy needs a scene with a prohibited product; `neutral` statements are
    always the catalog's.
    """
    if label == "neutral":
        return _neutral(rng, PRODUCTS[_pick(rng, scene.products)])
    if policy == "prohibited":
        return _category(rng, scene, label, policy)
    kind = _pick(rng, ("name", "name", "category", "count"))
    if kind == "category":
        return _category(rng, scene, label, policy)
    return _count(rng, scene, label) if kind == "count" else _name(rng, scene, label)


def caption(scene: Scene) -> str:
    """What the scene shows, in the order of PRODUCTS: `two dogs and one guitar`."""
    return " and ".join(counted(PRODUCTS[i], scene.products.count(i)) for i in sorted(set(scene.products)))


def scene_at(seed: int, index: int, prohibited: bool = False) -> tuple[Scene, Generator]:
    """The scene at an index of a seed's sequence, and the generator for statements about it."""
    rng = np.random.default_rng((seed, index))
    return draw_scene(rng, prohibited), rng
