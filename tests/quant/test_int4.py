"""Four-bit weights: codes, packing, and kernels that agree with plain torch."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from worker.errors import CheckpointRefused
from worker.quant import int4
from worker.quant.int4 import (
    KERNEL_TOLERANCE,
    Int4,
    Int4Linear,
    PackedLinear,
    UnpackedLinear,
    dequantize,
    group_of,
    pack,
    quantize,
    unpack,
    with_kernel,
)

#: (K, N, group) of Linears: the least, several groups a row, and small groups.
SHAPES = ((128, 16, 128), (512, 96, 128), (192, 64, 64), (96, 32, 32))
KERNELS = (UnpackedLinear, PackedLinear)


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def linear(k: int, n: int, group: int) -> Int4Linear:
    return Int4Linear(quantize(weight(n, k), group), weight(1, n, seed=1)[0])


def test_packed_codes_unpack_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128) % 16
    codes[1] = 15 - codes[1]

    packed = pack(codes)

    assert packed.shape == (2, 64)
    assert int(packed[0, 0]) == 0x10, "the even column is in the low nibble"
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("group", int4.GROUPS)
def test_a_weight_comes_back_within_half_a_step(group: int) -> None:
    original = weight(24, 384)

    stored = quantize(original, group)

    assert stored.scales.dtype == torch.float16
    step = stored.scales.float().repeat_interleave(group, 1)
    # At a range's ends, rounding the scale and the zero point costs up to another half.
    assert ((dequantize(stored) - original).abs() <= step * 1.01).all()
    assert ((dequantize(stored) - original).abs() <= step * 0.501).float().mean() > 0.95


def test_what_is_quantized_again_stays_the_same() -> None:
    once = dequantize(quantize(weight(8, 256), 128))
    assert torch.equal(dequantize(quantize(once, 128)), once)


def test_zero_weights_and_all_zero_groups_stay_zero() -> None:
    original = weight(4, 256)
    original[:, :128] = 0
    original[:, 130] = 0
    original[:, 131:] += 5

    found = dequantize(quantize(original, 128))

    assert not found[:, :128].any()
    assert not found[:, 130].any()


def test_a_narrowed_range_cuts_the_largest_and_is_finer_for_the_others() -> None:
    original = weight(1, 128)

    plain, narrowed = (quantize(original, 128, clip) for clip in (None, torch.tensor([[0.5]])))

    assert narrowed.scales.float().item() == pytest.approx(plain.scales.float().item() / 2, rel=1e-3)
    assert dequantize(narrowed).max() < 0.6 * original.max()


@pytest.mark.parametrize(("width", "group"), [(1024, 128), (64, 64), (192, 64), (96, 32)])
def test_a_row_is_cut_into_the_largest_groups_that_divide_it(width: int, group: int) -> None:
    assert group_of(width) == group


def test_a_width_that_no_group_divides_is_refused() -> None:
    with pytest.raises(CheckpointRefused, match="reads 100 channels"):
        group_of(100)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(1,), (3, 7), (2, 33, 5), (0,), (2, 0)])
def test_kernels_agree_with_the_reference(
    kernel: Callable[[Int4Linear], torch.nn.Module],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    batch: tuple[int, ...],
) -> None:
    reference = linear(*shape).to(dtype)
    x = torch.randn(*batch, shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)

    expected, found = reference(x), kernel(reference)(x)

    assert found.shape == expected.shape == (*batch, shape[1])
    assert found.dtype == dtype
    # The packed kernel computes in bfloat16 whatever it is given, which is why float32 is never sent there.
    tolerance = KERNEL_TOLERANCE[torch.bfloat16 if kernel is PackedLinear else dtype]
    assert (found - expected).float().norm() <= tolerance * expected.float().norm()


def test_the_reference_multiplies_with_the_dequantized_weights_and_adds_the_bias() -> None:
    module, x = linear(256, 32, 128), weight(5, 256, seed=3)
    expected = torch.nn.functional.linear(x, dequantize(module.canonical), module.bias)
    assert torch.equal(module(x), expected)
    assert torch.equal(module.dense()(x), expected)


@pytest.mark.parametrize(
    ("few_rows", "dtype", "kernel"),
    [
        (False, torch.float32, UnpackedLinear),
        (True, torch.float32, UnpackedLinear),
        (False, torch.bfloat16, UnpackedLinear),
        (True, torch.bfloat16, PackedLinear),
        (True, torch.float16, UnpackedLinear),
    ],
)
def test_the_kernel_is_fixed_by_place_and_precision(few_rows: bool, dtype: torch.dtype, kernel: type) -> None:
    assert type(with_kernel(linear(128, 64, 128).to(dtype), few_rows)) is kernel


@pytest.fixture
def fresh_check() -> Iterator[None]:
    int4.kernel_agrees.cache_clear()
    yield
    int4.kernel_agrees.cache_clear()


@pytest.mark.usefixtures("fresh_check")
@pytest.mark.parametrize("failure", ["missing", "wrong"])
def test_a_kernel_that_is_missing_or_wrong_is_not_used(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def embedding_bag_4bit_unpack(self, rows: Tensor) -> Tensor:
            if failure == "missing":
                raise AttributeError(failure)
            return torch.zeros(len(rows), 128)

    monkeypatch.setattr(torch.ops, "quantized", Broken())
    module = linear(128, 64, 128)

    assert with_kernel(module, few_rows=False) is module


def test_scales_keep_their_precision_whatever_is_computed_in() -> None:
    module = linear(128, 64, 128)
    scales = module.scales.clone()

    module.to(torch.bfloat16)

    assert module.bias.dtype == torch.bfloat16
    assert torch.equal(module.scales, scales)


def test_a_row_s_result_does_not_depend_on_how_many_there_are() -> None:
    module, x = with_kernel(linear(512, 96, 128), few_rows=False), weight(300, 512, seed=4)
    alone = torch.cat([module(row[None]) for row in x[:20]])
    torch.testing.assert_close(module(x)[:20], alone, atol=1e-4, rtol=1e-5)


def test_four_bits_take_little_more_than_a_quarter_of_float16() -> None:
    stored = quantize(weight(64, 1024), 128)
    taken = sum(t.numel() * t.itemsize for t in (stored.qweight, stored.scales, stored.zeros))
    assert taken / (2 * 64 * 1024) == pytest.approx(0.2617, abs=1e-4)
    assert isinstance(stored, Int4)
