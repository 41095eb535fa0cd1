"""base: the model that is fine-tuned, resolved and described; its weights stay where they are.

Reads   <source>                a diffusers folder, or a .yaml file that names a hub repository at a full commit
Writes  data/base/record.json   where the files are, the sha256 of each, the configuration of each component

Later stages depend on the record and check the weights against it when they load them.
"""

from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import BaseModelError
from stages.core.record import SECOND_TEXT, describe, locate
from stages.core.store import write_json
from stages.harness.run import Stage, stage_main


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Section `base` of params.yaml."""

    source: str  # path of the folder or of the .yaml file; also a dep in dvc.yaml


def base(cfg: BaseConfig, stage: Stage) -> None:
    """Find the base (fetch it from the hub if it is named there and not here yet) and record it."""
    folder, source = locate(Path(cfg.source), download=True)
    record = describe(folder, source)
    if SECOND_TEXT[0] in record.components:
        raise BaseModelError(
            f"{cfg.source} is of Stable Diffusion XL's kind, with two text encoders",
            remedy="encode reads such a base, but train does not yet; set base.source to a StableDiffusionPipeline",
        )
    write_json(stage.out / "record.json", record.to_json())
    size = sum(entry["bytes"] for entry in record.files.values())
    stage.tracker.tags({"base.digest": record.digest, "base.source": cfg.source})
    stage.say(f"{cfg.source}: {len(record.files)} files, {size / 1e6:.1f} MB, digest {record.digest[:12]}")


if __name__ == "__main__":
    stage_main("base", BaseConfig, base)
