"""Rows: what cannot be used is named, and can be left out."""

import torch

from stages.core.rows import Rows, not_finite

INF, NAN = float("inf"), float("nan")


def rows() -> Rows:
    parts = {"one": torch.arange(8.0).reshape(4, 2), "two": torch.arange(4.0).reshape(4, 1, 1)}
    return Rows(["a", "b", "c", "d"], parts)


def test_unusable_in_any_part() -> None:
    found = rows()
    assert found.unusable() == []
    found.parts["one"][1, 1] = -INF
    found.parts["two"][3] = NAN
    assert found.unusable() == ["b", "d"]


def test_what_is_left() -> None:
    left = rows().without(["d", "a"])
    assert left.names == ["b", "c"]
    assert left.parts["one"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert left.parts["two"].tolist() == [[[1.0]], [[2.0]]]
    assert rows().without(["a", "b", "c", "d"]).names == []
    whole = rows()
    assert whole.without([]) is whole


def test_places() -> None:
    assert not_finite(torch.zeros(2, 3), torch.tensor([[1.0], [INF]])) == [1]
    assert not_finite(torch.tensor([[NAN], [NAN]])) == [0, 1]
