"""Which files of this project a stage's code reaches: what its bytes can depend on.

Imports are followed from the stage through `stages.core`; `stages.harness` is not followed, because it must not
change bytes. tests/unit/test_closure.py holds dvc.yaml's deps to this.
"""

import ast
import hashlib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def closure(module: str, root: Path = PROJECT) -> list[str]:
    """The module's file and all core files that its imports reach, as sorted posix paths relative to `root`."""
    seen: dict[str, None] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        path = _file(name, root)
        if path is None or path in seen:
            continue
        seen[path] = None
        todo += _imports(root / path, name)
    return sorted(seen)


def closure_digest(module: str, root: Path = PROJECT) -> str:
    """sha256 over the names and bytes of `closure(module)`; 64 hex digits."""
    digest = hashlib.sha256()
    for path in closure(module, root):
        digest.update(path.encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return digest.hexdigest()


def _file(name: str, root: Path) -> str | None:
    path = root / name.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate.relative_to(root).as_posix()
    return None


def _imports(path: Path, module: str) -> list[str]:
    """Modules of this project that the file imports, at its top or inside functions; the harness excepted."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # from .errors import ...: relative to the module's package
                parts = module.split(".") + ([""] if path.name == "__init__.py" else [])
                base = ".".join([*parts[: -node.level], *([base] if base else [])])
            # `from stages.core import errors` may name modules, not only attributes.
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    packages = ("stages", "stages.core", "stages.core.models", "stages.core.training", "stages.harness")
    return [
        name
        for name in names
        if name.startswith("stages.") and not name.startswith("stages.harness") and name not in packages
    ]
