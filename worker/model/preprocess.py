"""A question as the network reads it: the text cleaned and set into its prompt, the picture made pixels.

Cleaning, prompts and normalisation are those of ModelScope's visual entailment preprocessor, so that what is scored is
what the checkpoint was trained on; what was cut off on the way is reported.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from worker.errors import ErrorCode, PairRejected
from worker.model.config import Configuration
from worker.model.tokenizer import Tokenizer

#: Flags of a text: it was longer than the network reads, or is mostly written in another script than the
#: checkpoint's language.
TEXT_CUT = "text_cut"
OFF_LANGUAGE = "off_language"

#: Share of letters outside the Latin script above which a text counts as not English.
OFF_LANGUAGE_SHARE = 0.5

#: Batches are padded to a multiple of this, so that few different shapes reach the device.
LENGTH_BUCKET_TOKENS = 8

#: Characters kept of a text for each token that the network reads. The longest tokens of GPT-2's vocabulary have 128,
#: so what is cut here was beyond the last token; uncut, a long word in a rare script takes a second to tokenize.
MAX_CHARS_PER_TOKEN = 256

#: Punctuation that is dropped where a text begins.
LEADING_PUNCTUATION = ",.!?*#:;~"


@dataclass(frozen=True)
class Prompt:
    """One question in words and in tokens."""

    ids: tuple[int, ...]  # with begin and end
    text: str  # as scored
    premise: str | None  # as scored
    flags: tuple[str, ...]


def make_prompt(text: str, premise: str | None, tokenizer: Tokenizer, configuration: Configuration) -> Prompt:
    """Clean a text, and its premise if it has one, and set them into the checkpoint's prompt.

    Words beyond `max_src_length` are cut from each text, and tokens beyond it from the prompt's end, which can take the
    prompt's closing words with it: the reference does the same. Raises PairRejected where cleaning leaves no text.
    """
    longest = configuration.max_src_length
    scored, cut = clean(text, longest)
    premise_scored, premise_cut = (None, False) if premise is None else clean(premise, longest)
    if not scored or premise_scored == "":
        what = "text" if not scored else "premise"
        raise PairRejected(ErrorCode.TEXT_EMPTY, f"nothing is left of the {what} once leading punctuation is dropped")
    if premise_scored is None:
        words = configuration.plain_prompt.format(scored)
    else:
        words = configuration.premise_prompt.format(premise_scored, scored)
    ids = tokenizer.encode(words)
    flags = []
    if cut or premise_cut or len(ids) > longest:
        flags.append(TEXT_CUT)
    if off_language(scored) or off_language(premise_scored or ""):
        flags.append(OFF_LANGUAGE)
    ids = [tokenizer.bos, *ids[:longest], tokenizer.eos]
    return Prompt(tuple(ids), scored, premise_scored, tuple(flags))


def clean(text: str, max_words: int) -> tuple[str, bool]:
    """The reference's caption cleaning, and whether words were cut.

    Lower case; leading punctuation dropped; hyphens and slashes to spaces; `<person>` to `person`; runs of white space
    to one space; newlines at the end and spaces at both ends dropped; at most `max_words` words. Beyond the reference,
    a lone surrogate, which is no character, becomes U+FFFD, and characters that no token can reach are cut.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = text.lower().lstrip(LEADING_PUNCTUATION)
    text = text.replace("-", " ").replace("/", " ").replace("<person>", "person")
    text = re.sub(r"\s{2,}", " ", text).rstrip("\n").strip(" ")
    words = text.split(" ")
    kept = " ".join(words[:max_words])[: max_words * MAX_CHARS_PER_TOKEN]
    return kept, len(kept) < len(text)


def off_language(text: str) -> bool:
    """Whether more than half of a text's letters are outside the Latin script; a text without letters is not."""
    letters = [character for character in text if character.isalpha()]
    foreign = sum(not _is_latin(character) for character in letters)
    return foreign > len(letters) * OFF_LANGUAGE_SHARE


@lru_cache(maxsize=4096)
def _is_latin(letter: str) -> bool:
    return "LATIN" in unicodedata.name(letter, "")


def make_square(image: Image.Image, configuration: Configuration) -> Tensor:
    """A picture as (S, S, 3) uint8, squeezed to a square by bicubic resampling. `normalised` makes it what is read."""
    side = configuration.patch_image_size
    square = image if image.mode == "RGB" else image.convert("RGB")
    if square.size != (side, side):
        square = square.resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square, dtype=np.uint8))


def normalised(squares: Tensor, configuration: Configuration) -> Tensor:
    """Squares (N, S, S, 3) in uint8 as (N, 3, S, S) in float32, normalised by channel, on whatever device they are.

    In memory the channels stay last, which is how the trunk wants them.
    """
    mean, std = (torch.tensor(v, device=squares.device)[:, None, None] for v in configuration.mean_and_std)
    return squares.permute(0, 3, 1, 2).to(torch.float32).div_(255).sub_(mean).div_(std)


def make_pixels(image: Image.Image, configuration: Configuration) -> Tensor:
    """A picture as the network reads it: (3, S, S) float32."""
    return normalised(make_square(image, configuration)[None], configuration)[0]


def padded_length(tokens: int, longest: int) -> int:
    """The length to which a prompt is padded: a multiple of LENGTH_BUCKET_TOKENS, but at most `longest`."""
    return min(-(-tokens // LENGTH_BUCKET_TOKENS) * LENGTH_BUCKET_TOKENS, longest)


def pad(prompts: Sequence[Sequence[int]], pad_id: int, longest: int) -> Tensor:
    """Token ids as (B, L), padded on the right; no prompt is longer than `longest`."""
    length = padded_length(max(len(ids) for ids in prompts), longest)
    batch = torch.full((len(prompts), length), pad_id, dtype=torch.long)
    for row, ids in zip(batch, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return batch
