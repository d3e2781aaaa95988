"""The product pictures in `glyphs/`; `python -m infra.demo_model.emoji FONT` draws them from Noto Color Emoji."""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from infra.demo_model.catalog import PRODUCTS, Product

#: Where the pictures lie, one PNG a product.
GLYPHS = Path(__file__).parent / "glyphs"

#: Longer side of a picture, in pixels.
GLYPH_SIDE_PX = 96

#: The font holds bitmaps of this one size.
FONT_SIZE_PX = 109


def glyph_path(product: Product) -> Path:
    """The file of a product's picture, named by its code point: `emoji_u1f45f.png`."""
    return GLYPHS / f"emoji_u{ord(product.emoji):x}.png"


def read_glyph(product: Product) -> Image.Image:
    """A product's picture: square, `GLYPH_SIDE_PX` a side, RGBA."""
    with Image.open(glyph_path(product)) as picture:
        return picture.convert("RGBA")


def draw_glyph(product: Product, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Draw the emoji, cut it to its ink and centre it on a transparent square."""
    canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((8, 8), product.emoji, font=font, embedded_color=True)
    ink = canvas.crop(canvas.getbbox())
    ink.thumbnail((GLYPH_SIDE_PX, GLYPH_SIDE_PX), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (GLYPH_SIDE_PX, GLYPH_SIDE_PX), (0, 0, 0, 0))
    square.paste(ink, ((GLYPH_SIDE_PX - ink.width) // 2, (GLYPH_SIDE_PX - ink.height) // 2))
    return square


def main() -> None:
    """Draw every product's picture anew."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("font", help="path of NotoColorEmoji.ttf (the bitmap font, SIL OFL 1.1)")
    font = ImageFont.truetype(parser.parse_args().font, FONT_SIZE_PX)
    GLYPHS.mkdir(exist_ok=True)
    for product in PRODUCTS:
        draw_glyph(product, font).save(glyph_path(product), optimize=True)


if __name__ == "__main__":
    main()
