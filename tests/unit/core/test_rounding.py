"""What fewer bits cost, by hand."""

import pytest
import torch

from stages.core.errors import ConfigError
from stages.core.rounding import difference, dtype_of, error_of, kept


def test_float32_loses_nothing() -> None:
    values = torch.tensor([[1.0, 1 / 3], [0.0, 2.0]])
    rounded, errors = kept(values, torch.float32)
    assert torch.equal(rounded, values)
    assert errors.tolist() == [[0.0, 0.0, 2.0], [0.0, 0.0, 2.0]]


def test_bfloat16_by_hand() -> None:
    # bfloat16 has 8 bits: near 1 its step is 2^-7, so 1 + 2^-8 lies between two numbers and falls to 1 (ties to even).
    rounded, errors = kept(torch.tensor([[1.0, 1.0 + 2**-8, 2.0], [1.0, 2.0, 3.0]]), torch.bfloat16)
    assert rounded.tolist() == [[1.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    assert errors.tolist() == [[2**-8, 2**-16, 3.0], [0.0, 0.0, 3.0]]


def test_too_large_for_float16_is_infinite() -> None:
    rounded, errors = kept(torch.tensor([[1e5]]), torch.float16)
    assert torch.isinf(rounded).all()
    assert torch.isinf(errors[0, 0])


def test_errors_together() -> None:
    one = difference(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 5.0]]))
    other = difference(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[2.0], [2.0]]]))
    assert one.tolist() == [[3.0, 9.0, 2.0]]
    assert other.tolist() == [[1.0, 1.0, 2.0]]
    assert error_of(torch.cat([one, other])) == {"max": 3.0, "rms": 1.58114}  # sqrt(10 / 4)


def test_names() -> None:
    assert dtype_of("encode.dtype", "bfloat16") == torch.bfloat16
    message = r"encode\.dtype is 'half'\n  remedy: set one of float32, float16, bfloat16"
    with pytest.raises(ConfigError, match=message):
        dtype_of("encode.dtype", "half")
