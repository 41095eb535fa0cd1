"""Presets: laid over params.yaml, comments kept, mistakes named."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.core.errors import ConfigError
from stages.harness.closure import PROJECT
from stages.harness.config import flatten, read_params
from stages.harness.presets import apply_preset, preset_names, render

PARAMS = """# The top comment.

seed: 1
train:
  steps: 240                       # how many
  rate: 5.0e-4
  precision: 'no'
  gamma: null
  adamw: {beta1: 0.9, beta2: 0.999}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / "params").mkdir()
    return tmp_path


def preset(files: Path, text: str) -> Path:
    path = files / "params" / "p.yaml"
    path.write_text(text)
    return path


def test_values_change_and_everything_else_stays(files: Path) -> None:
    path = preset(files, "train:\n  steps: 6\n  adamw: {beta2: 0.5}\n")
    expected = PARAMS.replace("steps: 240 ", "steps: 6   ").replace("0.999", "0.5")
    assert render(files / "params.yaml", path) == expected


def test_twice_is_once(files: Path) -> None:
    preset(files, "train: {steps: 6, gamma: 5.0}\n")
    apply_preset(files / "params.yaml", files / "params", "p")
    once = (files / "params.yaml").read_text()
    apply_preset(files / "params.yaml", files / "params", "p")
    assert (files / "params.yaml").read_text() == once
    assert read_params(files / "params.yaml")["train"]["gamma"] == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stps: 6}\n", r"p\.yaml: train\.stps is not a field of params\.yaml"),
        ("trian: 1\n", r"p\.yaml: trian is not a field of params\.yaml"),
        ("train: 5\n", r"p\.yaml: train is 5, params\.yaml has fields there"),
        ("seed: {a: 1}\n", r"p\.yaml: seed is \{'a': 1\}, params\.yaml has one value there"),
        ("", r"p\.yaml holds no fields"),
        ("a: [1\n", r"p\.yaml is not YAML"),
    ],
)
def test_mistakes_change_nothing(files: Path, text: str, message: str) -> None:
    preset(files, text)
    with pytest.raises(ConfigError, match=message):
        apply_preset(files / "params.yaml", files / "params", "p")
    assert (files / "params.yaml").read_text() == PARAMS


def test_unknown_name_lists_the_presets(files: Path) -> None:
    preset(files, "seed: 2\n")
    with pytest.raises(ConfigError, match=r"no preset is called 'q'\n  remedy: the presets are p$"):
        apply_preset(files / "params.yaml", files / "params", "q")


@pytest.mark.parametrize("name", preset_names(PROJECT / "params"))
def test_every_preset_of_the_repository(tmp_path: Path, name: str) -> None:
    source, laid = PROJECT / "params.yaml", PROJECT / "params" / f"{name}.yaml"
    (tmp_path / "params.yaml").write_text(render(source, laid))
    found, overlay = read_params(tmp_path / "params.yaml"), YAML(typ="safe").load(laid)
    assert flatten(found) == flatten(read_params(source)) | flatten(overlay)
    comments = [line.split("# ", 1)[1] for line in source.read_text().splitlines() if "# " in line]
    assert [
        line.split("# ", 1)[1] for line in (tmp_path / "params.yaml").read_text().splitlines() if "# " in line
    ] == comments
