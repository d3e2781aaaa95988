"""The network's short cuts give what the long way gives."""

import math
import random

import pytest
import torch
from torch import Tensor, nn

from tests.model.golden import TOLERANCE, loaded, picture, recorded
from worker.model.config import MAX_TOKENS, OFAConfig
from worker.model.decode import Answers, score
from worker.model.ofa import MAX_CACHED_GRIDS, OFA, Memory, token_buckets
from worker.model.preprocess import make_pixels
from worker.model.resnet import ResNet

TINY = OFAConfig(
    vocab_size=50,
    d_model=32,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_layers=2,
    decoder_attention_heads=2,
    decoder_ffn_dim=40,
    resnet_type="resnet18",
    image_bucket_size=6,
    token_bucket_size=8,
    max_position_embeddings=70,
)


@pytest.fixture
def tiny() -> OFA:
    torch.manual_seed(0)
    return OFA(TINY).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.tensor([[0, 9, 8, 7, 6, 2], [0, 9, 2, 1, 1, 1]])


def randomize_norms(trunk: nn.Module) -> None:
    for norm in trunk.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean, std=0.5)
            nn.init.uniform_(norm.running_var, 0.2, 3.0)
            nn.init.uniform_(norm.weight, 0.3, 1.5)
            nn.init.normal_(norm.bias, std=0.5)


@torch.no_grad()
def test_a_folded_trunk_equals_the_unfolded_one() -> None:
    torch.manual_seed(0)
    trunk = ResNet((2, 2, 2)).eval()
    randomize_norms(trunk)
    pixels = torch.randn(2, 3, 64, 64)
    unfolded = trunk(pixels)

    trunk.fold()

    assert not any(isinstance(module, nn.BatchNorm2d) for module in trunk.modules())
    torch.testing.assert_close(trunk(pixels), unfolded, rtol=1e-5, atol=1e-5 * unfolded.abs().max().item())


@torch.no_grad()
def test_folding_twice_changes_nothing() -> None:
    trunk = ResNet((1, 1, 1)).eval()
    randomize_norms(trunk)
    trunk.fold()
    once = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}

    trunk.fold()

    assert all(torch.equal(tensor, once[name]) for name, tensor in trunk.state_dict().items())


def test_folding_the_network_ends_gradients_and_turns_the_trunk_channels_last(tiny: OFA) -> None:
    tiny.fold()

    assert not any(parameter.requires_grad for parameter in tiny.parameters())
    assert tiny.encoder.embed_images.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_kept_position_bias_equals_a_new_one(tiny: OFA) -> None:
    with torch.no_grad():
        tiny.encoder.position_bias(3, 4, 40)
        positions, kept = tiny.encoder.position_bias(3, 4, 9)
    # With gradients on nothing is kept, so this one is made for exactly these sizes.
    new_positions, new = tiny.encoder.position_bias(3, 4, 9)

    torch.testing.assert_close(positions, new_positions)
    assert len(kept) == len(new) == TINY.encoder_layers
    for one, other in zip(kept, new, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_position_bias_is_made_once_for_all_shorter_texts(tiny: OFA, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int]] = []
    make = tiny.encoder._position_bias

    def make_and_note(h: int, w: int, length: int) -> tuple[Tensor, list[Tensor]]:
        made.append((h, w, length))
        return make(h, w, length)

    monkeypatch.setattr(tiny.encoder, "_position_bias", make_and_note)

    for length in (10, 12, 5, 32, 33, 7, 64, 70):
        _, biases = tiny.encoder.position_bias(2, 2, length)
        assert biases[0].shape[-1] == 4 + length

    assert made == [(2, 2, 32), (2, 2, 64), (2, 2, 70)]


@torch.no_grad()
def test_few_position_biases_are_kept(tiny: OFA) -> None:
    for side in range(1, 7):
        tiny.encoder.position_bias(side, side, 8)

    assert len(tiny.encoder._biases) == MAX_CACHED_GRIDS
    assert {key[0] for key in tiny.encoder._biases} == {5, 6}


def test_training_forgets_kept_position_biases(tiny: OFA, ids: Tensor) -> None:
    features = torch.randn(2, 1024, 2, 2)
    with torch.no_grad():
        before = tiny.encode(ids, features).states
        tiny.train()
        tiny.encoder.pos_q_linear.weight.mul_(2)
        tiny.eval()
        after = tiny.encode(ids, features).states

    assert (before - after).abs().max() > 1e-3


@torch.no_grad()
def test_loading_other_weights_forgets_kept_position_biases(tiny: OFA, ids: Tensor) -> None:
    features, other = torch.randn(2, 1024, 2, 2), OFA(TINY).eval()
    tiny.encode(ids, features)

    tiny.load_state_dict(other.state_dict())

    torch.testing.assert_close(tiny.encode(ids, features).states, other.encode(ids, features).states)


@torch.no_grad()
def test_pictures_looked_at_together_and_shared_equal_pictures_one_by_one() -> None:
    checkpoint = loaded()
    names = ["wide.jpg", "tall.png", "cmyk.jpg"]
    pixels = [make_pixels(picture(name), checkpoint.configuration) for name in names]
    ids = torch.tensor([recorded("plain")["cases"][0]["input_ids"]])

    shared = checkpoint.model.trunk(torch.stack(pixels))[torch.tensor([0, 1, 0, 2])]
    together = checkpoint.model.encode(ids.expand(4, -1), shared).states

    for row, place in enumerate((0, 1, 0, 2)):
        alone = checkpoint.model.encode(ids, checkpoint.model.trunk(pixels[place][None])).states
        torch.testing.assert_close(together[row : row + 1], alone, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_padding_changes_no_score(tiny: OFA, ids: Tensor) -> None:
    tiny.fold()
    features = torch.randn(2, 1024, 3, 2)
    closed = Answers(("a", "b", "c"), ((4,), (5, 6), (5, 7)), eos=2)
    padded = torch.nn.functional.pad(ids, (0, 40), value=1)

    close = score(tiny, ids, tiny.encode(ids, features), closed)
    wide = score(tiny, padded, tiny.encode(padded, features), closed)
    short = score(tiny, ids[1:, :3], tiny.encode(ids[1:, :3], features[1:]), closed)

    torch.testing.assert_close(wide.log_probs, close.log_probs, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(short.log_probs, close.log_probs[1:], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_the_order_of_words_and_of_patches_matters(tiny: OFA, ids: Tensor) -> None:
    features = torch.randn(1, 1024, 3, 3)
    states = tiny.encode(ids[:1], features).states

    assert (tiny.encode(ids[:1, [0, 2, 1, 3, 4, 5]], features).states - states)[:, -1].abs().max() > 1e-3
    assert (tiny.encode(ids[:1], features.flip(3)).states - states)[:, -1].abs().max() > 1e-4


@torch.no_grad()
def test_the_decoder_sees_no_later_token(tiny: OFA, ids: Tensor) -> None:
    memory = tiny.encode(ids, torch.randn(2, 1024, 2, 2))
    changed = ids.clone()
    changed[:, 3:] = 11

    first, second = tiny.decode(ids, memory), tiny.decode(changed, memory)

    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert (first[:, 3:] - second[:, 3:]).abs().max() > 1e-3


def test_gradients_reach_every_parameter(tiny: OFA, ids: Tensor) -> None:
    tiny.train()
    features = tiny.trunk(torch.randn(2, 3, 64, 64))
    hidden = tiny.decode(ids[:, :-1], tiny.encode(ids, features))

    torch.autograd.backward(tiny.logits(hidden).logsumexp(-1).square().sum())

    silent = [name for name, parameter in tiny.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert silent == []


def test_logits_of_chosen_tokens_are_columns_of_all(tiny: OFA) -> None:
    hidden, chosen = torch.randn(2, 3, 32), torch.tensor([4, 40, 7])

    torch.testing.assert_close(tiny.logits(hidden, chosen), tiny.logits(hidden)[..., chosen])


def test_memory_rows_may_repeat() -> None:
    memory = Memory(torch.arange(6.0).view(2, 3, 1), torch.zeros(1, 3, 1), torch.zeros(2, 1, 1, 3))

    rows = memory.rows(torch.tensor([1, 0, 1]))

    assert rows.states[:, 0, 0].tolist() == [3.0, 0.0, 3.0]
    assert rows.key_mask is not None
    assert rows.key_mask.shape == (3, 1, 1, 3)


def test_a_text_without_a_place_for_each_token_raises(tiny: OFA) -> None:
    with pytest.raises(ValueError, match="71 tokens does not fit the model's 70 positions"):
        tiny.encode(torch.full((1, 71), 5), torch.randn(1, 1024, 2, 2))
    with pytest.raises(ValueError, match="71 tokens does not fit the model's 70 positions"):
        tiny.decode(torch.full((1, 71), 5), tiny.encode(torch.full((1, 4), 5), torch.randn(1, 1024, 2, 2)))


def test_a_picture_without_a_place_for_each_patch_raises(tiny: OFA) -> None:
    with pytest.raises(ValueError, match="grid of 7 x 2 does not fit the model's 6 x 6 positions"):
        tiny.encode(torch.full((1, 4), 5), torch.randn(1, 1024, 7, 2))


@pytest.mark.parametrize("size", [8, 32, 256])
def test_token_buckets_follow_the_formula(size: int) -> None:
    buckets = token_buckets(1000, size, torch.device("cpu"))

    middle = size // 2
    for step in [*range(-20, 21), *random.Random(0).sample(range(-998, 999), k=200)]:
        expected = step
        if abs(step) > middle:
            far = math.log(abs(step) / middle) / math.log((MAX_TOKENS - 1) / middle) * (middle - 1)
            expected = (math.ceil(far) + middle) * (1 if step > 0 else -1)
        row = max(0, step)
        assert buckets[row, row - step] == expected + size - 1
    assert 0 <= buckets.min() <= buckets.max() <= 2 * size - 2


#: The hub's `iic/ofa_visual-entailment_snli-ve_large_en`, in sizes.
LARGE = OFAConfig(
    d_model=1024,
    encoder_layers=12,
    encoder_attention_heads=16,
    encoder_ffn_dim=4096,
    decoder_layers=12,
    decoder_attention_heads=16,
    decoder_ffn_dim=4096,
    resnet_type="resnet152",
)


@pytest.mark.slow
def test_ofa_large_builds_and_scores_a_picture_of_480_pixels() -> None:
    torch.manual_seed(0)
    model = OFA(LARGE)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.fold()
    ids = torch.tensor([[0, *range(100, 112), 2]])

    with torch.inference_mode():
        features = model.trunk(torch.randn(1, 3, 480, 480))
        memory = model.encode(ids, features)
        scores = score(model, ids, memory, Answers(("yes", "no", "maybe"), ((4,), (5,), (6, 7)), eos=2))

    print(f"OFA-large: {parameters:,} parameters")
    assert features.shape == (1, 1024, 30, 30)
    assert memory.states.shape == (1, 914, 1024)
    assert 460e6 < parameters < 480e6
    assert scores.probs.sum().item() == pytest.approx(1, abs=1e-5)
