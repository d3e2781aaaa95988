"""Text to token ids: OFA's byte-level BPE, the same as BART's and GPT-2's, from `vocab.json` and `merges.txt`.

A pair's text is data. What looks like a control token in it ("</s>", "<mask>", "<code_5>") is encoded as the plain
characters that it is, so that no text can end the prompt or stand for something else. This is the one place where ids
differ from the reference's, which takes such text for the token.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from worker.errors import CheckpointRefused

#: Ids of a vocabulary, far more than any has; the engine takes numbers of 32 bits.
MAX_IDS = 10_000_000


class Tokenizer:
    """Byte-level BPE with the ids of the control tokens that prompts are built of."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        """Raises CheckpointRefused when the vocabulary lacks a control token, a byte, or a merge's result."""
        self.bos, self.pad, self.eos = (_id(vocab, token) for token in ("<s>", "<pad>", "</s>"))
        # With every byte in the vocabulary no text can meet an unknown token.
        for byte in ByteLevel.alphabet():
            _id(vocab, byte)
        for left, right in merges:
            _id(vocab, left + right)
        self._engine = Engine(BPE(vocab=dict(vocab), merges=list(merges)))
        self._engine.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self.size = max(vocab.values()) + 1

    @classmethod
    def from_hub(cls, vocab: object, merges: str) -> "Tokenizer":
        """Read the contents of `vocab.json` (parsed) and `merges.txt`. Raises CheckpointRefused."""
        if not isinstance(vocab, dict) or not all(type(id_) is int and 0 <= id_ < MAX_IDS for id_ in vocab.values()):
            raise CheckpointRefused(f"vocab.json is not an object of token to id, 0 to {MAX_IDS - 1}.")
        pairs = [tuple(line.split(" ")) for line in merges.splitlines() if line and not line.startswith("#version")]
        if not all(len(pair) == 2 for pair in pairs):
            raise CheckpointRefused("merges.txt has a line that is not two tokens with a space between.")
        return cls(vocab, [(pair[0], pair[1]) for pair in pairs])

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone, without begin and end."""
        return list(self._engine.encode(text, add_special_tokens=False).ids)


def _id(vocab: Mapping[str, int], token: str) -> int:
    if token not in vocab:
        raise CheckpointRefused(f"vocab.json lacks the token {token!r}, which the tokenizer needs.")
    return vocab[token]
