"""The products that the demo model knows, their categories and the words for them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One product: `singular` and `plural` are its noun phrases without an article, `emoji` its picture."""

    singular: str
    plural: str
    category: str
    emoji: str


#: Category -> the phrase that a statement uses for it.
CATEGORIES: dict[str, str] = {
    "footwear": "footwear",
    "bag": "a bag",
    "clothing": "clothing",
    "electronics": "electronics",
    "toy": "a toy",
    "food": "food",
    "instrument": "a musical instrument",
    "furniture": "furniture",
    "jewelry": "jewelry",
    "animal": "an animal",
    "weapon": "a weapon",
    "alcohol": "alcohol",
    "tobacco": "tobacco",
    "medicine": "medicine",
}

#: What the `prohibited` policy asks about.
PROHIBITED: tuple[str, ...] = ("weapon", "alcohol", "tobacco", "medicine")

PRODUCTS: tuple[Product, ...] = (
    Product("sneaker", "sneakers", "footwear", "\U0001f45f"),
    Product("high heel", "high heels", "footwear", "\U0001f460"),
    Product("boot", "boots", "footwear", "\U0001f462"),
    Product("handbag", "handbags", "bag", "\U0001f45c"),
    Product("backpack", "backpacks", "bag", "\U0001f392"),
    Product("briefcase", "briefcases", "bag", "\U0001f4bc"),
    Product("shirt", "shirts", "clothing", "\U0001f455"),
    Product("dress", "dresses", "clothing", "\U0001f457"),
    Product("coat", "coats", "clothing", "\U0001f9e5"),
    Product("pair of jeans", "pairs of jeans", "clothing", "\U0001f456"),
    Product("phone", "phones", "electronics", "\U0001f4f1"),
    Product("laptop", "laptops", "electronics", "\U0001f4bb"),
    Product("camera", "cameras", "electronics", "\U0001f4f7"),
    Product("pair of headphones", "pairs of headphones", "electronics", "\U0001f3a7"),
    Product("teddy bear", "teddy bears", "toy", "\U0001f9f8"),
    Product("kite", "kites", "toy", "\U0001fa81"),
    Product("puzzle piece", "puzzle pieces", "toy", "\U0001f9e9"),
    Product("apple", "apples", "food", "\U0001f34e"),
    Product("banana", "bananas", "food", "\U0001f34c"),
    Product("pizza", "pizzas", "food", "\U0001f355"),
    Product("burger", "burgers", "food", "\U0001f354"),
    Product("cake", "cakes", "food", "\U0001f382"),
    Product("guitar", "guitars", "instrument", "\U0001f3b8"),
    Product("violin", "violins", "instrument", "\U0001f3bb"),
    Product("drum", "drums", "instrument", "\U0001f941"),
    Product("chair", "chairs", "furniture", "\U0001fa91"),
    Product("couch", "couches", "furniture", "\U0001f6cb"),
    Product("bed", "beds", "furniture", "\U0001f6cf"),
    Product("ring", "rings", "jewelry", "\U0001f48d"),
    Product("crown", "crowns", "jewelry", "\U0001f451"),
    Product("dog", "dogs", "animal", "\U0001f415"),
    Product("cat", "cats", "animal", "\U0001f408"),
    Product("fish", "fish", "animal", "\U0001f41f"),
    Product("knife", "knives", "weapon", "\U0001f52a"),
    Product("sword", "swords", "weapon", "\U0001f5e1"),
    Product("bow", "bows", "weapon", "\U0001f3f9"),
    Product("bomb", "bombs", "weapon", "\U0001f4a3"),
    Product("glass of wine", "glasses of wine", "alcohol", "\U0001f377"),
    Product("mug of beer", "mugs of beer", "alcohol", "\U0001f37a"),
    Product("cocktail", "cocktails", "alcohol", "\U0001f378"),
    Product("cigarette", "cigarettes", "tobacco", "\U0001f6ac"),
    Product("pill", "pills", "medicine", "\U0001f48a"),
    Product("syringe", "syringes", "medicine", "\U0001f489"),
)

#: What a picture cannot show.
UNDECIDABLE: tuple[str, ...] = (
    "is brand new",
    "was made in italy",
    "costs ten dollars",
    "is on sale",
    "comes with a warranty",
    "was used once",
    "is handmade",
    "ships today",
    "belongs to a doctor",
    "was a gift",
)

NUMBERS: tuple[str, ...] = ("zero", "one", "two", "three")


def with_article(phrase: str) -> str:
    """`apple` -> `an apple`."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def counted(product: Product, count: int) -> str:
    """`two dogs`, `one dog`."""
    return f"{NUMBERS[count]} {product.singular if count == 1 else product.plural}"
