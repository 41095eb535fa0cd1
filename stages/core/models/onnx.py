"""ONNX files of the model's parts: written the same bytes each time, run with onnxruntime.

The layout, names of inputs and outputs are those of optimum (`ORTStableDiffusionPipeline.from_pretrained(folder)`):
text_encoder, unet, vae_decoder and vae_encoder, each a folder with `model.onnx` and `config.json`.

Letters: B batch, C channels, H W pixels, h w latents, L tokens, D width.
"""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import external_data_helper
from torch import Tensor, nn

from stages.core.models.folder import read_config, write_shared
from stages.core.parity import Outputs, Probe
from stages.core.store import write_atomic, write_json

MODEL_NAME = "model.onnx"
DATA_NAME = "model.onnx_data"
OPSETS = range(
    14, 21
)  # 14: the first with the operators of attention; 20: the last that this exporter writes

# A protobuf message holds at most 2 GiB: beyond this the weights go to a file beside (SD1.5's U-Net has 3.4 GB).
SPLIT_BYTES = 2_000_000_000


class _TextEncoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids)
        return out.last_hidden_state, out.pooler_output


class _Unet(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return self.model(sample, timestep, encoder_hidden_states=encoder_hidden_states, return_dict=False)[0]


class _VaeDecoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: Tensor) -> Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class _VaeEncoder(nn.Module):
    """Pixels -> mean and log-variance of the posterior, one after the other along C; drawing is the caller's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor) -> Tensor:
        return self.model.encode(sample).latent_dist.parameters


_PICTURE = {0: "batch", 2: "height", 3: "width"}
_TEXT = {0: "batch", 1: "tokens"}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """How one part is traced: its wrapper, where its config is, its inputs and outputs with their free axes."""

    wrapper: type[nn.Module]
    config: str  # folder in the base
    inputs: dict[str, dict[int, str]]
    outputs: dict[str, dict[int, str]]


_PARTS = {
    "text_encoder": _Part(
        wrapper=_TextEncoder,
        config="text_encoder",
        inputs={"input_ids": _TEXT},
        outputs={"last_hidden_state": _TEXT, "pooler_output": {0: "batch"}},
    ),
    "unet": _Part(
        wrapper=_Unet,
        config="unet",
        # One timestep for the whole batch, or one for each row.
        inputs={"sample": _PICTURE, "timestep": {0: "steps"}, "encoder_hidden_states": _TEXT},
        outputs={"out_sample": _PICTURE},
    ),
    "vae_decoder": _Part(
        wrapper=_VaeDecoder, config="vae", inputs={"latent_sample": _PICTURE}, outputs={"sample": _PICTURE}
    ),
    "vae_encoder": _Part(
        wrapper=_VaeEncoder,
        config="vae",
        inputs={"sample": _PICTURE},
        outputs={"latent_parameters": _PICTURE},
    ),
}
PARTS = tuple(_PARTS)


def probe_inputs(probe: Probe) -> dict[str, tuple[Tensor, ...]]:
    """The inputs of each part, in the order of its names."""
    return {
        "text_encoder": (probe.ids_BL,),
        "unet": (probe.noisy_BChw, probe.steps_B, probe.text_BLD),
        "vae_decoder": (probe.latents_BChw,),
        "vae_encoder": (probe.pixels_BCHW,),
    }


def write_support(folder: Path, base: Path, schedule: dict[str, Any]) -> None:
    """Write what is not a graph: model_index.json, tokenizer, scheduler and the parts' configurations.

    schedule: the fields of the scheduler that the U-Net was trained for.
    """
    write_shared(folder, base, schedule)
    for name, part in _PARTS.items():
        write_json(folder / name / "config.json", read_config(base / part.config))


def write_part(
    name: str, model: Any, folder: Path, probe: Probe, *, opset: int, split_bytes: int = SPLIT_BYTES
) -> Path:
    """Write `folder/<name>/model.onnx`, float32, with free batch, height, width and tokens; returns its path.

    model: the torch part (U-Net without adapters). probe: example inputs; a batch of 1 would be taken for a constant.
    """
    part = _PARTS[name]
    target = folder / name / MODEL_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as scratch:
        traced = Path(scratch) / MODEL_NAME
        # Warnings: that this exporter is the older one, and Python branches that the trace fixes. The newer one takes ten
        # times as long, names axes itself and writes this machine's paths; parity is checked at other shapes than traced.
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                part.wrapper(model).eval(),
                probe_inputs(probe)[name],
                str(traced),
                input_names=list(part.inputs),
                output_names=list(part.outputs),
                dynamic_axes={**part.inputs, **part.outputs},
                opset_version=opset,
                dynamo=False,
            )
        graph = onnx.load(traced)
    _strip(graph)
    _save(graph, target, split_bytes)
    return target


def _strip(model: onnx.ModelProto) -> None:
    """Remove what does not compute: producer, notes, metadata. They hold versions and paths."""
    for field in (
        "producer_name",
        "producer_version",
        "domain",
        "model_version",
        "doc_string",
        "metadata_props",
    ):
        model.ClearField(field)
    graph = model.graph
    for entry in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        entry.ClearField("doc_string")
        if "metadata_props" in entry.DESCRIPTOR.fields_by_name:
            entry.ClearField("metadata_props")


def _save(model: onnx.ModelProto, path: Path, split_bytes: int) -> None:
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if weights > split_bytes:
        # It appends to a file that is there.
        (path.parent / DATA_NAME).unlink(missing_ok=True)
        external_data_helper.convert_model_to_external_data(
            model, all_tensors_to_one_file=True, location=DATA_NAME, size_threshold=1024
        )
        external_data_helper.write_external_data_tensors(model, str(path.parent))
    write_atomic(path, model.SerializeToString(deterministic=True))


class OnnxModel:
    """The parts of an ONNX folder in onnxruntime, on one CPU thread: the order of its sums is then fixed."""

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._sessions: dict[str, Any] = {
            name: onnxruntime.InferenceSession(
                str(folder / name / MODEL_NAME), options, providers=["CPUExecutionProvider"]
            )
            for name in PARTS
            if (folder / name / MODEL_NAME).is_file()
        }

    def run(self, probe: Probe) -> Outputs:
        """The first output of every part that the folder holds."""
        inputs = probe_inputs(probe)
        return {name: self.part(name, *inputs[name]) for name in self._sessions}

    def part(self, name: str, *inputs: Tensor) -> Tensor:
        """The first output of one part."""
        session = self._sessions[name]
        feed = {key: value.numpy() for key, value in zip(_PARTS[name].inputs, inputs, strict=True)}
        return torch.from_numpy(cast(np.ndarray[Any, Any], session.run(None, feed)[0]))
