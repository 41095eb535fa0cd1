"""dvc.yaml's deps are what the imports reach: an edit that can change bytes reruns the stage, no other edit does."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.harness.closure import PROJECT, closure, closure_digest

STAGES = ("ingest", "base", "preprocess", "encode", "train", "evaluate", "export")
PIPELINE: dict[str, Any] = YAML(typ="safe").load(PROJECT / "dvc.yaml")["stages"]
SOURCES = sorted((PROJECT / "stages").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """All modules that the file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def test_the_pipeline_has_the_seven_stages() -> None:
    assert tuple(PIPELINE) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_code_deps_are_the_closure(stage: str) -> None:
    listed = [dep for dep in PIPELINE[stage]["deps"] if dep.startswith("stages/")]
    assert listed == closure(f"stages.{stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_depends_on_the_environment_and_is_run_by_the_launcher(stage: str) -> None:
    assert {"requirements.lock", "requirements-torch.txt"} <= set(PIPELINE[stage]["deps"])
    assert PIPELINE[stage]["cmd"] == f"python -m stages.harness.launch {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_params_are_what_the_stage_uses(stage: str) -> None:
    """Its section, `runtime`, and the shared values that its code (or the core code that it reaches) reads."""
    text = "".join((PROJECT / path).read_text() for path in closure(f"stages.{stage}"))
    used = {stage, "runtime"} | set(re.findall(r"shared\.(seed|device|determinism)\b", text))
    if "determinism.apply" in (PROJECT / f"stages/{stage}.py").read_text():
        used |= {"determinism"}
    assert set(PIPELINE[stage]["params"]) >= used
    # The fingerprint of stored work holds device and determinism for every stage; a dep that is not read costs a rerun
    # at most, so these two alone may stand there for stages that compute.
    assert set(PIPELINE[stage]["params"]) - used <= {"determinism", "device"}


@pytest.mark.parametrize("stage", STAGES)
def test_params_yaml_parses_for_the_stage(stage: str) -> None:
    import importlib

    from stages.harness.config import load_section, load_shared, read_params

    params = read_params(PROJECT / "params.yaml")
    load_shared(params)
    module = importlib.import_module(f"stages.{stage}")
    config = load_section(params, stage, getattr(module, f"{stage.capitalize()}Config"))
    assert dataclasses.asdict(config) == params[stage]


def test_core_imports_neither_harness_nor_mlflow_nor_omegaconf_nor_a_stage() -> None:
    for path in (PROJECT / "stages" / "core").rglob("*.py"):
        for module in imports(path):
            assert not module.startswith(("stages.harness", "mlflow", "omegaconf")), (name(path), module)
            assert not module.startswith("stages.") or module.startswith("stages.core"), (name(path), module)


def test_only_core_models_touch_the_model_libraries() -> None:
    for path in SOURCES:
        touched = {
            module
            for module in imports(path)
            if module.split(".")[0] in ("diffusers", "transformers", "peft")
        }
        assert not touched or "/core/models/" in path.as_posix(), (name(path), touched)
        if "accelerate" in imports(path):
            assert name(path) in ("stages/core/ranks.py",)


def test_stages_never_import_each_other_and_core_is_not_imported_dynamically() -> None:
    modules = {f"stages.{stage}" for stage in STAGES}
    for path in SOURCES:
        assert not imports(path) & modules, name(path)
    for path in (PROJECT / "stages" / "core").rglob("*.py"):
        assert "importlib" not in path.read_text().replace("importlib.metadata", ""), name(path)


def test_packages_are_empty_because_closures_leave_them_out() -> None:
    for path in (PROJECT / "stages").rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), (
            name(path)
        )


@pytest.mark.parametrize("stage", STAGES)
def test_no_edge_to_the_harness(stage: str) -> None:
    assert not [
        path for path in closure(f"stages.{stage}") if "/harness/" in path or path.endswith("__init__.py")
    ]


# --- the closure itself, on a project made for it


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "stages/one.py": "import torch\nfrom stages.core import a\nfrom stages.harness.run import x\n",
        "stages/core/__init__.py": "",
        "stages/core/a.py": "def f():\n    import stages.core.models.m as m\n",
        "stages/core/b.py": "from stages.core.a import f\n",
        "stages/core/c.py": "",
        "stages/core/models/__init__.py": "",
        "stages/core/models/m.py": "from .n import x\nfrom ..b import f\nfrom . import o\n",
        "stages/core/models/n.py": "",
        "stages/core/models/o.py": "",
        "stages/harness/run.py": "from stages.core.c import x\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_imports_are_followed_into_functions_relatively_and_in_circles(project: Path) -> None:
    assert closure("stages.one", project) == [
        "stages/core/a.py",
        "stages/core/b.py",
        "stages/core/models/m.py",
        "stages/core/models/n.py",
        "stages/core/models/o.py",
        "stages/one.py",
    ]


def test_digest_follows_the_closure_alone(project: Path) -> None:
    before = closure_digest("stages.one", project)
    (project / "stages/core/c.py").write_text("changed = 1\n")
    (project / "stages/harness/run.py").write_text("changed = 1\n")
    assert closure_digest("stages.one", project) == before
    (project / "stages/core/models/n.py").write_text("changed = 1\n")
    assert closure_digest("stages.one", project) != before
