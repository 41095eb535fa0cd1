"""ONNX files: bytes without a past, free shapes, and the layout that optimum reads."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from stages.core.models import onnx as onnx_files
from stages.core.models.folder import model_shape, run_torch
from stages.core.models.schedule import base_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.unet import load_unet
from stages.core.models.vae import Vae
from stages.core.parity import Probe, compare_all, make_probes, require
from tests.tiny import make_tiny_base


class _Model:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.text = TextEncoder(base, "cpu")
        self.vae = Vae(base, "cpu")
        self.unet: Any = load_unet(base / "unet", "cpu")
        self.probes: list[Probe] = make_probes(model_shape(self.unet, self.vae, self.text, 1000), seed=0)

    def part(self, name: str) -> Any:
        return {"text_encoder": self.text.model, "unet": self.unet}.get(name, self.vae.model)

    def run(self, probe: Probe) -> dict[str, torch.Tensor]:
        return run_torch(probe, text=self.text.model, unet=self.unet, vae=self.vae.model)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> _Model:
    return _Model(make_tiny_base(tmp_path_factory.mktemp("base")))


def _write(model: _Model, folder: Path, *names: str, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    onnx_files.write_support(folder, model.base, base_schedule(model.base))
    for name in names:
        onnx_files.write_part(name, model.part(name), folder, model.probes[1], opset=17, **options)
    return folder


@pytest.fixture(scope="module")
def folder(model: _Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(model, tmp_path_factory.mktemp("onnx"), *onnx_files.PARTS)


def test_layout(folder: Path) -> None:
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    parts = [f"{part}/{name}" for part in onnx_files.PARTS for name in ("config.json", "model.onnx")]
    shared = ["model_index.json", "scheduler/scheduler_config.json"]
    assert found == sorted([*parts, *shared, "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"])
    assert "_name_or_path" not in (folder / "unet" / "config.json").read_text()
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["safety_checker"] == [None, None]


def test_another_schedule_is_written_and_the_bases_copied(model: _Model, tmp_path: Path) -> None:
    fields = base_schedule(model.base)
    path = Path("scheduler") / "scheduler_config.json"
    onnx_files.write_support(tmp_path / "same", model.base, fields)
    assert (tmp_path / "same" / path).read_bytes() == (model.base / path).read_bytes()
    other = fields | {"prediction_type": "epsilon"}
    onnx_files.write_support(tmp_path / "other", model.base, other)
    assert base_schedule(tmp_path / "other") == other
    assert sorted(found.name for found in (tmp_path / "other" / "scheduler").iterdir()) == [path.name]


@pytest.mark.parametrize("name", onnx_files.PARTS)
def test_nothing_but_the_graph_is_left(folder: Path, model: _Model, name: str) -> None:
    path = folder / name / "model.onnx"
    loaded = onnx.load(path)
    onnx.checker.check_model(loaded)
    assert (loaded.producer_name, loaded.producer_version, loaded.doc_string) == ("", "", "")
    assert len(loaded.metadata_props) == 0
    assert [entry.version for entry in loaded.opset_import] == [17]
    assert not any(node.doc_string or node.metadata_props for node in loaded.graph.node)
    data = path.read_bytes()
    for leak in (b"site-packages", b"torch", b"/work", b"/tmp", b".py"):
        assert leak not in data, leak


def test_free_axes_and_names(folder: Path) -> None:
    def axes(values: Any) -> dict[str, list[Any]]:
        return {
            value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
            for value in values
        }

    unet = onnx.load(folder / "unet" / "model.onnx").graph
    assert axes(unet.input) == {
        "sample": ["batch", 4, "height", "width"],
        "timestep": ["steps"],
        "encoder_hidden_states": ["batch", "tokens", 32],
    }
    assert axes(unet.output) == {"out_sample": ["batch", 4, "height", "width"]}
    text = onnx.load(folder / "text_encoder" / "model.onnx").graph
    assert axes(text.input) == {"input_ids": ["batch", "tokens"]}
    assert [value.name for value in text.output] == ["last_hidden_state", "pooler_output"]
    encoder = onnx.load(folder / "vae_encoder" / "model.onnx").graph
    assert axes(encoder.input) == {"sample": ["batch", 3, "height", "width"]}
    assert list(axes(encoder.output)) == ["latent_parameters"]
    assert axes(encoder.output)["latent_parameters"][1] == 8


def test_agrees_with_torch_at_every_probe(folder: Path, model: _Model) -> None:
    session = onnx_files.OnnxModel(folder)
    got = [session.run(probe) for probe in model.probes]
    checks = compare_all("onnx", got, [model.run(probe) for probe in model.probes], 1e-5)
    assert len(checks) == 12
    require(checks)
    assert min(check.error for check in checks) >= 0


def test_one_timestep_serves_the_whole_batch(folder: Path, model: _Model) -> None:
    session = onnx_files.OnnxModel(folder)
    probe = model.probes[2]
    one = torch.tensor([500])
    got = session.part("unet", probe.noisy_BChw, one, probe.text_BLD)
    each = session.part("unet", probe.noisy_BChw, one.expand(3).contiguous(), probe.text_BLD)
    assert torch.equal(got, each)


def test_other_lengths_of_text(folder: Path, model: _Model) -> None:
    session = onnx_files.OnnxModel(folder)
    ids = model.probes[2].ids_BL[:, -5:]
    with torch.inference_mode():
        expected = model.text.model(ids).last_hidden_state
    torch.testing.assert_close(session.part("text_encoder", ids), expected, atol=1e-5, rtol=0)


def test_same_bytes_in_another_folder(folder: Path, model: _Model, tmp_path: Path) -> None:
    other = _write(model, tmp_path / "with another name", "unet", "text_encoder")
    for name in ("unet", "text_encoder"):
        assert (other / name / "model.onnx").read_bytes() == (folder / name / "model.onnx").read_bytes()
    assert not list(other.glob(".onnx-*"))


def test_weights_beyond_the_limit_of_protobuf_go_beside(model: _Model, tmp_path: Path, folder: Path) -> None:
    first = _write(model, tmp_path / "a", "vae_decoder", split_bytes=1000)
    again = _write(model, tmp_path / "b", "vae_decoder", split_bytes=1000)
    files = sorted(path.name for path in (first / "vae_decoder").iterdir())
    assert files == ["config.json", "model.onnx", "model.onnx_data"]
    for name in files:
        assert (first / "vae_decoder" / name).read_bytes() == (again / "vae_decoder" / name).read_bytes()
    assert (first / "vae_decoder" / "model.onnx").stat().st_size < (
        first / "vae_decoder" / "model.onnx_data"
    ).stat().st_size
    probe = model.probes[1]
    split = onnx_files.OnnxModel(first).run(probe)
    assert list(split) == ["vae_decoder"]
    assert torch.equal(split["vae_decoder"], onnx_files.OnnxModel(folder).run(probe)["vae_decoder"])
    # Written over itself, it is the same and does not grow.
    size = (first / "vae_decoder" / "model.onnx_data").stat().st_size
    _write(model, first, "vae_decoder", split_bytes=1000)
    assert (first / "vae_decoder" / "model.onnx_data").stat().st_size == size


@pytest.mark.parametrize("opset", [onnx_files.OPSETS[0], onnx_files.OPSETS[-1]])
def test_the_ends_of_the_opset_range_work(model: _Model, tmp_path: Path, opset: int) -> None:
    for name in onnx_files.PARTS:
        onnx_files.write_part(name, model.part(name), tmp_path, model.probes[1], opset=opset)
    got = onnx_files.OnnxModel(tmp_path).run(model.probes[2])
    require(compare_all("onnx", [got], [model.run(model.probes[2])], 1e-5))
