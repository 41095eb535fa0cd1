"""Captions of a source folder: `metadata.jsonl`, `metadata.csv` (file_name, text), or a `.txt` beside each picture.

Every fault is named with its file and line; nothing is guessed or dropped.
"""

import csv
import io
import json
from pathlib import Path, PurePosixPath
from typing import Any, cast

from stages.core.errors import SourceError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
_LISTED = 10


def picture_files(folder: Path) -> list[str]:
    """All picture files under `folder`, as posix paths relative to it, sorted. Hidden files are not looked at.

    Raises SourceError for a missing or empty folder and for a link that leaves it.
    """
    if not folder.is_dir():
        raise SourceError(
            f"{folder} is missing",
            remedy="put your pictures there, or run `python -m stages.cli sample-data` for the sample pictures, "
            "or `dvc pull` if they are in a DVC remote",
        )
    top = folder.resolve()
    names: list[str] = []
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if (
            any(part.startswith(".") for part in relative.parts)
            or path.suffix.lower() not in PICTURE_SUFFIXES
        ):
            continue
        if not path.resolve().is_relative_to(top):
            raise SourceError(
                f"{path} is a link out of {folder}", remedy="put the picture itself into the folder"
            )
        if path.is_file():
            names.append(relative.as_posix())
    if not names:
        raise SourceError(
            f"{folder} holds no pictures ({', '.join(PICTURE_SUFFIXES)})",
            remedy="put captioned pictures there; README, 'Your own pictures'",
        )
    return sorted(names)


def read_captions(folder: Path, pictures: list[str]) -> dict[str, str]:
    """The caption of each picture in `pictures`, stripped of surrounding white space.

    Raises SourceError that names the file and the line: a missing, empty or doubled caption, a listed picture that is
    not there, text that is not UTF-8.
    """
    present = [name for name in METADATA_NAMES if (folder / name).is_file()]
    if len(present) > 1:
        raise SourceError(f"{folder} holds {' and '.join(present)}", remedy="keep one of them")
    if not present:
        return _from_sidecars(folder, pictures)
    path = folder / present[0]
    rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _csv_rows(path)
    captions: dict[str, str] = {}
    known = set(pictures)
    for line, row in rows:
        name, text = _row_fields(path, line, row)
        if name in captions:
            raise SourceError(
                f"{path}, line {line}: {name} has a second caption", remedy="keep one line for each picture"
            )
        if name not in known:
            raise SourceError(
                f"{path}, line {line}: {name} is not a picture in {folder}",
                remedy="put the picture there or remove the line",
            )
        captions[name] = text
    _refuse_missing(
        folder, [name for name in pictures if name not in captions], f"has no line in {path.name}"
    )
    return captions


def _from_sidecars(folder: Path, pictures: list[str]) -> dict[str, str]:
    captions: dict[str, str] = {}
    missing: list[str] = []
    for name in pictures:
        path = (folder / name).with_suffix(".txt")
        if not path.is_file():
            missing.append(name)
            continue
        text = _read_text(path).strip()
        if not text:
            raise SourceError(f"{path} is empty", remedy="write the caption of the picture into it")
        captions[name] = text
    _refuse_missing(
        folder, missing, "has no caption: there is no metadata.jsonl, no metadata.csv and no .txt beside it"
    )
    return captions


def _refuse_missing(folder: Path, names: list[str], why: str) -> None:
    if names:
        listed = ", ".join(names[:_LISTED]) + (
            f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        )
        raise SourceError(
            f"{folder}: {len(names)} picture(s) without caption ({listed}): each {why}",
            remedy="add the captions, or take the pictures out of the folder",
        )


def _row_fields(path: Path, line: int, row: dict[str, Any]) -> tuple[str, str]:
    for field in ("file_name", "text"):
        if not isinstance(row.get(field), str):
            raise SourceError(
                f"{path}, line {line}: field {field!r} is {'missing' if field not in row else 'not text'}",
                remedy='each line needs "file_name" and "text"',
            )
    name, text = PurePosixPath(row["file_name"]), row["text"].strip()
    if name.is_absolute() or ".." in name.parts:
        raise SourceError(
            f"{path}, line {line}: {name} leaves the folder", remedy="use paths inside the folder only"
        )
    if not text:
        raise SourceError(f"{path}, line {line}: the caption of {name} is empty", remedy="write one")
    return name.as_posix(), text


def _jsonl_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            value: Any = json.loads(text)
        except ValueError as error:
            raise SourceError(
                f"{path}, line {line}: not JSON ({error})", remedy="one JSON object a line"
            ) from error
        if not isinstance(value, dict):
            raise SourceError(f"{path}, line {line}: not a JSON object", remedy="one JSON object a line")
        rows.append((line, cast(dict[str, Any], value)))
    return rows


def _csv_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    missing = {"file_name", "text"} - set(reader.fieldnames or [])
    if missing:
        raise SourceError(
            f"{path}, line 1: no column {', '.join(sorted(missing))}",
            remedy="the first line names the columns",
        )
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise SourceError(f"{path}, line {reader.line_num}: {error}", remedy="correct the line") from error


def _read_text(path: Path) -> str:
    """UTF-8 with or without byte order mark. Raises SourceError that names the line of the first other byte."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SourceError(f"{path}, line {line}: not UTF-8", remedy="save the file as UTF-8") from error
