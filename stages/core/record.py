"""The base model's record: where the weights are, and the sha256 of each file; the weights themselves stay there.

`base.source` is one path: a diffusers folder, or a small YAML file that names a hub repository at a full commit:

    repo: owner/name
    revision: 40 hex digits
    variant: fp16        # or null
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML, YAMLError

from stages.core.errors import BaseModelError
from stages.core.store import fingerprint, sha256_file

COMPONENTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
SECOND_TEXT = ("text_encoder_2", "tokenizer_2")
PIPELINES = {"StableDiffusionPipeline": COMPONENTS, "StableDiffusionXLPipeline": COMPONENTS + SECOND_TEXT}
_WITH_WEIGHTS = ("unet", "vae", "text_encoder", "text_encoder_2")
_WEIGHTS = (".safetensors",)
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_PLAIN = (".json", ".txt", ".safetensors", ".model")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A hub repository at one commit."""

    repo: str
    revision: str
    variant: str | None


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """What `data/base/record.json` holds."""

    source: dict[str, Any]
    files: dict[str, dict[str, Any]]  # relative path -> {"sha256", "bytes"}
    components: dict[str, dict[str, Any]]  # name -> {"class", "config", "digest"}
    digest: str  # over all components

    def component_digest(self, *names: str) -> str:
        """One digest over the named components: what work that uses only these depends on."""
        return fingerprint({name: self.components[name]["digest"] for name in names})

    @property
    def text_components(self) -> tuple[str, ...]:
        """The text encoders and tokenizers: of one, or of both."""
        return tuple(name for name in ("text_encoder", "tokenizer", *SECOND_TEXT) if name in self.components)

    @property
    def vae_digest(self) -> str:
        """What latents depend on."""
        return self.component_digest("vae")

    @property
    def text_digest(self) -> str:
        """What text states depend on."""
        return self.component_digest(*self.text_components)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "format": 1,
            "source": self.source,
            "files": self.files,
            "components": self.components,
            "digest": self.digest,
        }


def read_hub_source(path: Path) -> HubSource:
    """Read a hub pointer file. Raises BaseModelError that names the field and the remedy."""
    if path.suffix not in (".yaml", ".yml"):
        raise BaseModelError(
            f"{path} is neither a diffusers folder nor a .yaml file",
            remedy="single-file checkpoints are not read; convert them to a diffusers folder",
        )
    try:
        value: Any = YAML(typ="safe").load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise BaseModelError(
            f"{path} is not YAML: {error}", remedy="it needs repo and revision, and may have variant"
        ) from error
    if not isinstance(value, dict):
        raise BaseModelError(f"{path} holds no fields", remedy="it needs repo, revision and variant")
    fields = cast(dict[str, Any], value)
    unknown = sorted(set(fields) - {"repo", "revision", "variant"})
    missing = sorted({"repo", "revision"} - set(fields))
    if unknown or missing:
        raise BaseModelError(
            f"{path}: unknown fields {unknown}, missing fields {missing}",
            remedy="it needs repo and revision, and may have variant",
        )
    repo, revision, variant = fields["repo"], fields["revision"], fields.get("variant")
    for name, field in (("repo", repo), ("revision", revision), ("variant", variant or "")):
        if not isinstance(field, str):
            raise BaseModelError(f"{path}: {name} is {field!r}, not text", remedy="put it into quotes")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise BaseModelError(f"{path}: repo is {repo!r}", remedy="give it as owner/name")
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise BaseModelError(
            f"{path}: revision is {revision!r}",
            remedy="give the full commit hash (40 hex digits): a branch or a tag can move",
        )
    return HubSource(repo=repo, revision=revision, variant=variant or None)


def locate(source: Path, *, download: bool) -> tuple[Path, dict[str, Any]]:
    """The diffusers folder of `source` and its description for the record.

    A hub repository is looked up in the hub's cache; with `download`, what is missing is fetched first. Raises
    BaseModelError when it is not there.
    """
    if source.is_dir():
        return source, {"kind": "folder", "path": source.as_posix()}
    if not source.is_file():
        raise BaseModelError(
            f"base.source is {source}, and there is nothing there",
            remedy="give the path of a diffusers folder, or of a .yaml file with repo and revision",
        )
    hub = read_hub_source(source)
    description = {"kind": "hub", "repo": hub.repo, "revision": hub.revision, "variant": hub.variant}
    return _hub_folder(hub, download=download), description


def _hub_folder(hub: HubSource, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    weights = f"*.{hub.variant}.safetensors" if hub.variant else "*.safetensors"
    patterns = ["model_index.json"]
    names = COMPONENTS + SECOND_TEXT
    patterns += [f"{name}/{kind}" for name in names for kind in ("*.json", "*.txt", "*.model", weights)]
    try:
        folder = snapshot_download(
            hub.repo, revision=hub.revision, allow_patterns=patterns, local_files_only=not download
        )
    except GatedRepoError as error:
        raise BaseModelError(
            f"{hub.repo} is gated",
            remedy="accept its licence on the hub and set HF_TOKEN_PATH to a token file",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise BaseModelError(
            f"{hub.repo} at {hub.revision} is not on the hub",
            remedy="check repo and revision in the .yaml file",
        ) from error
    except Exception as error:  # the client raises what its HTTP library raises
        if not download:
            raise BaseModelError(
                f"{hub.repo} at {hub.revision} is not in this machine's hub cache",
                remedy="run `dvc repro --force base`, which fetches it",
            ) from error
        raise BaseModelError(
            f"{hub.repo} at {hub.revision} could not be fetched: {type(error).__name__}: {error}",
            remedy="check the network (HF_ENDPOINT names a mirror), then run the same command again; "
            "what has arrived is kept",
        ) from error
    return Path(folder)


def describe(folder: Path, source: dict[str, Any]) -> BaseRecord:
    """Read and hash the diffusers folder. Raises BaseModelError for a missing part or a pickle-only one."""
    index = _read_json(folder / "model_index.json", "a diffusers pipeline folder has one")
    names = PIPELINES.get(str(index.get("_class_name")))
    if names is None:
        raise BaseModelError(
            f"{folder / 'model_index.json'} says {index.get('_class_name')!r}",
            remedy=f"this version reads folders of {' and '.join(PIPELINES)}",
        )
    classes = {name: cast(list[Any], index.get(name) or ["", ""])[-1] for name in names}
    files: dict[str, dict[str, Any]] = {}
    components: dict[str, dict[str, Any]] = {}
    for name in names:
        part = folder / name
        paths = sorted(path for path in part.glob("*") if path.suffix in _PLAIN and path.is_file())
        if not paths:
            raise BaseModelError(f"{part} is missing or empty", remedy="a base needs " + ", ".join(names))
        if name in _WITH_WEIGHTS and not any(path.suffix in _WEIGHTS for path in paths):
            pickles = sorted(path.name for path in part.glob("*") if path.suffix in _PICKLES)
            raise BaseModelError(
                f"{part} has no .safetensors weights" + (f", only {', '.join(pickles)}" if pickles else ""),
                remedy="pickled weights can run code and are never loaded; convert them to safetensors",
            )
        _check_weights(paths)
        for path in paths:
            files[f"{name}/{path.name}"] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        own = {path.name: files[f"{name}/{path.name}"]["sha256"] for path in paths}
        config = next((part / file for file in _CONFIGS[name] if (part / file).is_file()), None)
        if config is None:
            raise BaseModelError(f"{part} has no {_CONFIGS[name][0]}", remedy="the folder is incomplete")
        components[name] = {
            "class": classes[name],
            "config": _read_json(config, "it is part of every diffusers folder"),
            "digest": fingerprint(own),
        }
    files["model_index.json"] = {
        "sha256": sha256_file(folder / "model_index.json"),
        "bytes": (folder / "model_index.json").stat().st_size,
    }
    digest = fingerprint({name: part["digest"] for name, part in components.items()})
    return BaseRecord(source=source, files=files, components=components, digest=digest)


def _check_weights(paths: list[Path]) -> None:
    """Raises BaseModelError for safetensors cut short (a broken download, a Git LFS pointer) and for missing parts."""
    for path in paths:
        if path.suffix in _WEIGHTS and safetensors_size(path) != path.stat().st_size:
            raise BaseModelError(
                f"{path} is not a whole safetensors file ({path.stat().st_size:,} bytes)",
                remedy="get it again; a file of about 130 bytes is a Git LFS pointer: run `git lfs pull` there",
            )
        if path.name.endswith(".safetensors.index.json"):
            listed = _read_json(path, "restore the file").get("weight_map", {}).values()
            for part in sorted(set(listed)):
                if not (path.parent / part).is_file():
                    raise BaseModelError(
                        f"{path.parent / part} is missing, {path.name} names it",
                        remedy="the folder is incomplete",
                    )


def safetensors_size(path: Path) -> int:
    """The file size that the header states; -1 when there is no readable header."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > 100_000_000:
            return -1
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return -1
    return 8 + length + max(ends, default=0)


_CONFIGS = {
    "unet": ("config.json",),
    "vae": ("config.json",),
    "text_encoder": ("config.json",),
    "tokenizer": ("tokenizer_config.json",),
    "scheduler": ("scheduler_config.json",),
    "text_encoder_2": ("config.json",),
    "tokenizer_2": ("tokenizer_config.json",),
}


def read_record(path: Path) -> BaseRecord:
    """Read `data/base/record.json`."""
    value = _read_json(path, "run `dvc repro base` to make it")
    try:
        return BaseRecord(**{name: value[name] for name in ("source", "files", "components", "digest")})
    except KeyError as error:
        raise BaseModelError(
            f"{path} has no field {error}", remedy="run `dvc repro --force base` to make it anew"
        ) from error


def recorded_folder(record: BaseRecord, root: Path, *, download: bool = False) -> Path:
    """Where the recorded base is: a folder (relative to `root`), or the hub's cache.

    With `download`, files of a hub repository that are not in the cache are fetched. Raises BaseModelError.
    """
    if record.source["kind"] == "folder":
        return root / record.source["path"]
    hub = HubSource(**{name: record.source[name] for name in ("repo", "revision", "variant")})
    if not download:
        return _hub_folder(hub, download=False)
    try:
        folder = _hub_folder(hub, download=False)
    except BaseModelError:
        return _hub_folder(hub, download=True)
    whole = all((folder / name).is_file() for name in record.files)
    return folder if whole else _hub_folder(hub, download=True)


def verified_folder(record: BaseRecord, root: Path, *names: str) -> Path:
    """The base's folder, after checking the files of components `names` against the record.

    root: what a relative folder in the record is relative to. Raises BaseModelError that names the file.
    """
    folder = recorded_folder(record, root)
    for name, entry in record.files.items():
        if name.split("/")[0] not in names:
            continue
        path = folder / name
        if not path.is_file():
            raise BaseModelError(f"{path} is missing", remedy="put the base back, or run `dvc repro base`")
        if sha256_file(path) != entry["sha256"]:
            raise BaseModelError(
                f"{path} is not the file that data/base/record.json describes",
                remedy="restore it, or run `dvc repro base` to record the new base (later stages then rerun)",
            )
    return folder


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    if not path.is_file():
        raise BaseModelError(f"{path} is missing", remedy=hint)
    try:
        value: Any = json.loads(path.read_text())
    except ValueError as error:
        raise BaseModelError(f"{path} is not JSON: {error}", remedy="restore the file") from error
    if not isinstance(value, dict):
        raise BaseModelError(f"{path} is not a JSON object", remedy="restore the file")
    return cast(dict[str, Any], value)
