"""Eight-bit weights, and activations scaled token by token."""

import pytest
import torch
from torch import Tensor

from worker.quant import int8
from worker.quant.int8 import Int8Linear, quantize


def rows(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def linear(k: int = 96, n: int = 40) -> Int8Linear:
    return Int8Linear(*quantize(rows(n, k)), rows(1, n, seed=1)[0])


@pytest.mark.parametrize("batch", [(1,), (3, 7), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_near_that_of_the_plain_weights(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    module = linear().to(dtype)
    x = torch.randn(*batch, 96, generator=torch.Generator().manual_seed(2)).to(dtype)

    found, expected = module(x), module.dense().to(dtype)(x)

    assert found.shape == expected.shape == (*batch, 40)
    assert found.dtype == dtype
    assert (found - expected).float().norm() <= 0.015 * expected.float().norm()


def test_a_token_s_result_does_not_depend_on_its_mates() -> None:
    module, x = linear(), rows(50, 96, seed=3)
    x[1:] *= torch.logspace(-3, 3, 49)[:, None]
    assert torch.equal(module(x)[:1], module(x[:1]))


def test_products_of_the_largest_codes_are_exact_with_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.full((3, 1024), 127, dtype=torch.int8)
    qweight = torch.full((8, 1024), -127, dtype=torch.int8)
    assert (int8.product(codes, qweight) == -127 * 127 * 1024).all()

    monkeypatch.setattr(int8, "kernel_agrees", lambda device: False)

    assert (int8.product(codes, qweight) == -127 * 127 * 1024).all()


def test_a_kernel_that_is_missing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    int8.kernel_agrees.cache_clear()
    monkeypatch.delattr(torch, "_int_mm")
    try:
        assert not int8.kernel_agrees("cpu")
    finally:
        int8.kernel_agrees.cache_clear()


def test_rows_of_zeros_give_the_bias() -> None:
    module = linear()
    assert torch.equal(module(torch.zeros(2, 96)), module.bias.expand(2, -1))
