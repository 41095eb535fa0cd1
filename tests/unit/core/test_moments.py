"""Forwards of one shape: a row's bits depend on the row alone."""

import pytest
import torch

from stages.core.models.vae import LatentSpace, Vae
from stages.core.moments import encode_group, grouped
from stages.core.rows import Rows
from stages.core.sampler import stream
from tests.tiny import make_tiny_base


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Vae:
    return Vae(make_tiny_base(tmp_path_factory.mktemp("moments")), "cpu")


def picture(number: int, size: tuple[int, int] = (16, 16)) -> torch.Tensor:
    return torch.from_numpy(stream(1, "pixels", number).integers(0, 256, size=(3, *size), dtype="uint8"))


def test_groups_are_of_one_shape_and_full_while_they_can_be() -> None:
    wide = {1, 4, 5, 9}
    rows = ((f"{n}", picture(n, (16, 24) if n in wide else (16, 16))) for n in range(11))
    names = [[name for name, _ in group] for group in grouped(rows, 3)]
    assert names == [["0", "2", "3"], ["1", "4", "5"], ["6", "7", "8"], ["10"], ["9"]]


def test_groups_are_given_as_soon_as_they_are_full() -> None:
    taken: list[int] = []

    def rows() -> object:
        for number in range(4):
            taken.append(number)
            yield f"{number}", picture(number)

    groups = grouped(rows(), 2)  # pyright: ignore[reportArgumentType]
    next(groups)
    assert taken == [0, 1]


def encode(vae: Vae, numbers: list[int], batch_size: int = 4) -> Rows:
    group = [(f"{number}", picture(number)) for number in numbers]
    return encode_group(vae, group, batch_size=batch_size, keep=torch.float32, exact=lambda: vae)


def test_a_row_depends_neither_on_its_place_nor_on_its_companions(vae: Vae) -> None:
    alone = encode(vae, [2])
    for companions in ([2, 0, 1, 3], [5, 2], [7, 8, 9, 2]):
        found = encode(vae, companions)
        for part in ("mean", "logvar", "facts"):
            assert torch.equal(found.parts[part][companions.index(2)], alone.parts[part][0])


def test_it_is_what_the_vae_gives_and_padding_is_not(vae: Vae) -> None:
    found = encode(vae, [1, 2])
    mean, logvar = vae.moments(torch.stack([picture(1), picture(2), picture(2), picture(2)]))
    assert found.names == ["1", "2"]
    assert sorted(found.parts) == ["facts", "logvar", "mean"]
    assert torch.equal(found.parts["mean"], mean[:2])
    assert torch.equal(found.parts["logvar"], logvar[:2])
    assert found.parts["facts"].tolist() == [[0.0, 0.0, 64.0, 0.0, 0.0, 64.0, 0.0]] * 2


class HalfBroken:
    """In half precision, with one row of the batch not finite."""

    dtype = torch.float16

    def __init__(self, vae: Vae, bad: int, value: float) -> None:
        self.vae, self.bad, self.value = vae, bad, value

    def moments(self, pixels_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, logvar = (part.clone() for part in self.vae.moments(pixels_BCHW))
        mean += 1.0
        mean[self.bad, 0, 0, 0] = self.value
        return mean, logvar


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_only_rows_that_are_not_finite_come_from_float32(vae: Vae, value: float) -> None:
    group = [(f"{number}", picture(number)) for number in range(3)]
    asked: list[int] = []

    def exact() -> Vae:
        asked.append(1)
        return vae

    half = HalfBroken(vae, 1, value)
    found = encode_group(half, group, batch_size=4, keep=torch.float32, exact=exact)  # pyright: ignore[reportArgumentType]
    right = encode(vae, [0, 1, 2])
    assert asked == [1]
    assert torch.equal(found.parts["mean"][1], right.parts["mean"][1])
    assert torch.equal(found.parts["mean"][0], right.parts["mean"][0] + 1.0)
    assert found.parts["facts"][:, 6].tolist() == [0.0, 1.0, 0.0]
    assert found.unusable() == []


def test_padding_that_is_not_finite_is_nobodys(vae: Vae) -> None:
    group = [(f"{number}", picture(number)) for number in range(3)]
    half = HalfBroken(vae, 3, float("nan"))
    found = encode_group(half, group, batch_size=4, keep=torch.float32, exact=lambda: pytest.fail("asked"))  # pyright: ignore
    assert found.unusable() == []


def test_latent_space_of_any_vae() -> None:
    """SD 1.5's, SDXL's, and one of 16 channels with a shift (Flux, SD 3): from their configurations alone."""
    four = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 4}
    assert LatentSpace.of(four | {"scaling_factor": 0.13025}) == LatentSpace(
        channels=4, downsample=8, scaling_factor=0.13025, shift_factor=0.0
    )
    assert LatentSpace.of(four).scaling_factor == 0.18215
    sixteen = four | {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    assert LatentSpace.of(sixteen) == LatentSpace(
        channels=16, downsample=8, scaling_factor=0.3611, shift_factor=0.1159
    )
