"""params.yaml -> frozen dataclasses. Everything wrong with a section is collected and raised together."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from ruamel.yaml import YAML, YAMLError

from stages.core.determinism import DeterminismConfig
from stages.core.errors import ConfigError

T = TypeVar("T")
PARAMS = Path("params.yaml")
STAGES = ("ingest", "base", "preprocess", "encode", "train", "evaluate", "export")
CORRECT = "correct params.yaml; docs/params.md explains every field"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """The top-level values of params.yaml that several stages depend on."""

    seed: int  # of everything random
    device: str  # cpu or cuda; auto would make the result depend on where it ran
    runtime: str  # native or container
    determinism: DeterminismConfig


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`; did you mean X?` with the nearest of `known`, or nothing when none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read_params(path: Path = PARAMS) -> dict[str, Any]:
    """The whole file as plain values. Raises ConfigError with the line when it is not YAML."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing", remedy="run this at the top of a clone of the repository")
    try:
        value: Any = YAML(typ="safe").load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}: {problem}", remedy="correct the YAML there") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no sections", remedy="restore it with `git checkout params.yaml`")
    return cast(dict[str, Any], value)


def load_shared(params: dict[str, Any]) -> SharedConfig:
    """The shared values. Raises ConfigError for values that nothing can run with, and for a section that nobody reads."""
    names = [field.name for field in dataclasses.fields(SharedConfig)]
    # A stage's own section is judged by its own dataclass, in its own process.
    shared = parse({name: params[name] for name in params if name not in STAGES}, SharedConfig, where="")
    problems: list[str] = []
    if shared.device not in ("cpu", "cuda"):
        problems.append(
            f"params.yaml: device is {shared.device!r}; set cpu or cuda: the choice is part of the result, so it is "
            "never guessed"
        )
    if shared.runtime not in ("native", "container"):
        problems.append(f"params.yaml: runtime is {shared.runtime!r}; set native or container")
    if problems:
        raise ConfigError("\n  ".join(problems), remedy=f"correct {', '.join(names)} in params.yaml")
    return shared


def load_section(params: dict[str, Any], name: str, kind: type[T]) -> T:
    """Section `name` as the dataclass `kind`."""
    if name not in params:
        raise ConfigError(f"params.yaml has no section {name!r}", remedy=f"add it; {_fields_text(kind)}")
    return parse(params[name], kind, where=name)


def parse(value: Any, kind: type[T], *, where: str) -> T:
    """Plain values -> `kind`. Raises one ConfigError that lists all unknown, missing and wrong fields.

    where: the section's name; "" for the top of params.yaml.
    """
    problems: list[str] = []
    built = _build(value, kind, where, problems)
    if problems:
        raise ConfigError(
            "\n  ".join(f"params.yaml: {problem}" for problem in problems),
            remedy=CORRECT,
        )
    return cast(T, built)


def _build(value: Any, kind: type[Any], where: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{where} should hold fields, but is {value!r}")
        return None
    given = cast(dict[str, Any], value)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    prefix = f"{where}." if where else ""
    for unknown in [name for name in given if name not in names]:
        known = [*names, *(STAGES if not where else ())]
        problems.append(f"{prefix}{unknown} is unknown{did_you_mean(str(unknown), known)}")
    built: dict[str, Any] = {}
    for name in names:
        if name not in given:
            problems.append(f"{prefix}{name} is missing")
        elif dataclasses.is_dataclass(hints[name]):
            built[name] = _build(given[name], cast(type[Any], hints[name]), f"{prefix}{name}", problems)
        else:
            built[name] = _leaf(given[name], hints[name], f"{prefix}{name}", problems)
    return None if problems else kind(**built)


def _leaf(value: Any, hint: Any, where: str, problems: list[str]) -> Any:
    """One field, as OmegaConf converts it for `hint`, once it is written as what it is."""
    wanted = getattr(hint, "__name__", None) if isinstance(hint, type) and not typing.get_args(hint) else None
    wanted = wanted or str(hint).replace("typing.", "")
    if "${" in str(value):
        problems.append(f"{where} is {value!r}; write the value itself, DVC does not follow interpolations")
        return None
    # YAML reads 1e-5 as text; OmegaConf would make it a float, but DVC hashes the text: one notation only.
    if float in (hint, *typing.get_args(hint)) and isinstance(value, str) and _is_number(value):
        problems.append(f"{where} is the text {value!r}; write it with a point, as 1.0e-5")
        return None
    if not _fits(value, hint):
        problems.append(f"{where} is {value!r}, expected {wanted}")
        return None
    schema = dataclasses.make_dataclass("Leaf", [("value", hint)])
    try:
        node = OmegaConf.merge(OmegaConf.structured(schema), {"value": value})
        plain: Any = OmegaConf.to_container(node, throw_on_missing=True)
    except OmegaConfBaseException:
        problems.append(f"{where} is {value!r}, expected {wanted}")
        return None
    return plain["value"]


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` is written as `hint`: OmegaConf alone takes "16" for an int, 1 for a bool and 64 for text."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(entry, parts[0]) for entry in cast(list[Any], value))
    if parts:
        return any(_fits(value, part) for part in parts)
    if hint is float:
        return type(value) in (float, int) and math.isfinite(value)
    # bool is an int to isinstance.
    return type(value) is hint or (isinstance(value, hint) and not isinstance(value, bool))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fields_text(kind: type[Any]) -> str:
    return "its fields: " + ", ".join(field.name for field in dataclasses.fields(kind))


def flatten(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values -> {"train.lora.rank": 8, ...}; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            flat |= flatten(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
