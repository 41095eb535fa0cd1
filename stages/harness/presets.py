"""Presets: small YAML files in params/ that are laid over params.yaml, its comments kept."""

import io
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML, YAMLError

from stages.core.errors import ConfigError
from stages.core.store import write_atomic


def preset_names(folder: Path) -> list[str]:
    """The presets that exist."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def render(params: Path, preset: Path) -> str:
    """params.yaml's text with the preset's values. Raises ConfigError for a field that params.yaml does not have."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 110
    # Else null would be rewritten as nothing.
    yaml.representer.add_representer(type(None), _null)
    base: Any = yaml.load(params)
    try:
        overlay: Any = YAML(typ="safe").load(preset)
    except YAMLError as error:
        raise ConfigError(f"{preset} is not YAML: {error}", remedy="correct the preset") from error
    if not isinstance(overlay, dict):
        raise ConfigError(f"{preset} holds no fields", remedy="correct the preset")
    _lay_over(base, overlay, preset, "")
    text = io.StringIO()
    yaml.dump(base, text)
    return text.getvalue()


def apply_preset(params: Path, folder: Path, name: str) -> None:
    """Rewrite params.yaml by preset `name`."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"no preset is called {name!r}",
            remedy=f"the presets are {', '.join(preset_names(folder)) or 'none'}",
        )
    write_atomic(params, render(params, path).encode())


def _lay_over(base: Any, overlay: Any, preset: Path, where: str) -> None:
    for key, value in cast(dict[str, Any], overlay).items():
        if key not in base:
            raise ConfigError(
                f"{preset}: {where}{key} is not a field of params.yaml", remedy="correct the preset"
            )
        if isinstance(value, dict) != isinstance(base[key], dict):
            raise ConfigError(
                f"{preset}: {where}{key} is {value!r}, params.yaml has {_kind(base[key])} there",
                remedy="correct the preset",
            )
        if isinstance(value, dict):
            _lay_over(base[key], value, preset, f"{where}{key}.")
        else:
            base[key] = value


def _null(representer: Any, _value: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _kind(value: Any) -> str:
    return "fields" if isinstance(value, dict) else "one value"
