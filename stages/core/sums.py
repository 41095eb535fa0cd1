"""SHA256SUMS of a folder, in the form that `sha256sum -c` reads. Written last: a folder without it is unfinished."""

from pathlib import Path

from stages.core.errors import StoreError
from stages.core.store import sha256_file, write_atomic

SUMS_NAME = "SHA256SUMS"


def write_sums(folder: Path) -> Path:
    """Write `folder/SHA256SUMS`: one line a file, all files below `folder`, sorted by path."""
    lines = [f"{sha256_file(folder / name)}  {name}\n" for name in _files(folder)]
    write_atomic(folder / SUMS_NAME, "".join(lines).encode())
    return folder / SUMS_NAME


def verify_sums(folder: Path) -> int:
    """Check every file below `folder` against its SHA256SUMS; returns how many there are.

    Raises StoreError that names all files which are missing, changed or not listed.
    """
    path = folder / SUMS_NAME
    if not path.is_file():
        raise StoreError(
            f"{path} is missing: {folder} was never finished", remedy="run `dvc repro export` to make it"
        )
    expected: dict[str, str] = {}
    for line in path.read_text().splitlines():
        digest, _, name = line.partition("  ")
        expected[name] = digest
    present = _files(folder)
    problems = [f"{name} is missing" for name in expected if name not in present]
    problems += [f"{name} is not listed" for name in present if name not in expected]
    problems += [
        f"{name} was changed"
        for name in present
        if name in expected and sha256_file(folder / name) != expected[name]
    ]
    if problems:
        raise StoreError(
            f"{folder} does not match its {SUMS_NAME}: " + "; ".join(sorted(problems)),
            remedy=f"run `dvc checkout --force {folder}`, or make it anew with `dvc repro --force export`",
        )
    return len(present)


def _files(folder: Path) -> list[str]:
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).as_posix() != SUMS_NAME
    )
    for name in names:
        # sha256sum escapes these; no exporter here writes such a name.
        if "\n" in name or "\\" in name:
            raise StoreError(f"{folder} holds a file called {name!r}", remedy="rename it")
    return names
