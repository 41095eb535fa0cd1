"""Captions of a source folder: `metadata.jsonl`, `metadata.csv` (file_name, text), or a `.txt` beside each picture.

Every fault is named with its file and line; nothing is guessed or dropped.
"""

import csv
import io
import json
import unicodedata
from pathlib import Path, PurePosixPath
from typing import Any, cast

from stages.core.errors import SourceError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Pictures of other kinds are named, not passed over.
_FOREIGN_SUFFIXES = (
    ".heic",
    ".heif",
    ".avif",
    ".jxl",
    ".jp2",
    ".svg",
    ".psd",
    ".dng",
    ".cr2",
    ".nef",
    ".ppm",
    ".tga",
)
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
_LISTED = 10


def picture_files(folder: Path) -> list[str]:
    """All picture files under `folder`, as posix paths relative to it, sorted. Hidden files are not looked at.

    Raises SourceError for a missing or empty folder, for a link that leaves it or leads nowhere, for a linked folder, a
    picture of a kind that is not read, and a name that is not UTF-8.
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
        if any(part.startswith(".") for part in relative.parts):
            continue
        if path.is_symlink() and path.is_dir():
            raise SourceError(f"{path} is a link to a folder", remedy="put the pictures themselves there")
        suffix = path.suffix.lower()
        if suffix in _FOREIGN_SUFFIXES and path.is_file():
            raise SourceError(
                f"{path} is of a kind that is not read ({suffix})",
                remedy="save it as PNG, JPEG or WebP, or take it out of the folder",
            )
        if suffix not in PICTURE_SUFFIXES or path.is_dir():
            continue
        _refuse_link(path, folder, top)
        names.append(_utf8_name(relative))
    if not names:
        raise SourceError(
            f"{folder} holds no pictures ({', '.join(PICTURE_SUFFIXES)})",
            remedy="put captioned pictures there; README, 'Your own pictures'",
        )
    return sorted(names)


def _refuse_link(path: Path, folder: Path, top: Path) -> None:
    if not path.resolve().is_relative_to(top):
        raise SourceError(
            f"{path} is a link out of {folder}",
            remedy="put the picture itself into the folder (`dvc unprotect` does, where DVC made the link)",
        )
    if not path.is_file():
        raise SourceError(f"{path} is a link to nothing", remedy="put the picture itself into the folder")


def _utf8_name(relative: Path) -> str:
    name = relative.as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"the file name {name!r} is not UTF-8", remedy="rename the file") from error
    return name


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
    beside = [name for name in pictures if (folder / name).with_suffix(".txt").is_file()]
    if beside:
        raise SourceError(
            f"{folder} holds {path.name}, and {len(beside)} picture(s) have a .txt as well ({beside[0]} is the first)",
            remedy=f"keep one form: remove {path.name}, or the .txt files",
        )
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
                f"{path}, line {line}: {name} is not a picture in {folder}{_other_form(name, pictures)}",
                remedy="put the picture there, or correct or remove the line",
            )
        captions[name] = text
    _refuse_missing(
        folder, [name for name in pictures if name not in captions], f"has no line in {path.name}"
    )
    return captions


def _other_form(name: str, pictures: list[str]) -> str:
    """A hint for names that look the same: macOS writes an accent as a character of its own."""
    normal = unicodedata.normalize("NFC", name)
    same = [other for other in pictures if unicodedata.normalize("NFC", other) == normal]
    return f" (the file is called {same[0]!a}, the line says {name!a})" if same else ""


def _from_sidecars(folder: Path, pictures: list[str]) -> dict[str, str]:
    captions: dict[str, str] = {}
    missing: list[str] = []
    owners: dict[Path, str] = {}
    for name in pictures:
        path = (folder / name).with_suffix(".txt")
        if path.is_file() and owners.setdefault(path, name) != name:
            raise SourceError(
                f"{path} stands beside {owners[path]} and {name}", remedy="rename one of the two pictures"
            )
        if not path.is_file():
            missing.append(name)
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SourceError(
                f"{path} is a link out of {folder}", remedy="put the caption itself into the folder"
            )
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
    if any("\ud800" <= letter <= "\udfff" for letter in f"{name}{text}"):
        raise SourceError(
            f"{path}, line {line}: half of a surrogate pair (\\ud800 to \\udfff)", remedy="correct the escape"
        )
    return name.as_posix(), text


def _jsonl_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            value: Any = json.loads(text, object_pairs_hook=_single_keys)
        except ValueError as error:
            raise SourceError(
                f"{path}, line {line}: not JSON ({error})", remedy="one JSON object a line"
            ) from error
        if not isinstance(value, dict):
            raise SourceError(f"{path}, line {line}: not a JSON object", remedy="one JSON object a line")
        rows.append((line, cast(dict[str, Any], value)))
    return rows


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field stands there twice")
    return fields


def _csv_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Rows with the line that each begins on: a quoted caption may run over several."""
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    names: list[str] | None = None
    rows: list[tuple[int, dict[str, Any]]] = []
    line = 1
    try:
        for fields in reader:
            if names is None:
                names = fields
                _refuse_columns(path, names)
            elif len(fields) > len(names):
                raise SourceError(
                    f"{path}, line {line}: {len(fields)} fields for {len(names)} columns",
                    remedy='put a caption that holds commas into quotes: name.png,"red, round"',
                )
            elif fields:
                rows.append((line, dict(zip(names, fields, strict=False))))
            line = reader.line_num + 1
    except csv.Error as error:
        raise SourceError(f"{path}, line {line}: {error}", remedy="correct the line") from error
    if names is None:
        _refuse_columns(path, [])
    return rows


def _refuse_columns(path: Path, names: list[str]) -> None:
    missing = {"file_name", "text"} - set(names)
    if missing or len(set(names)) < len(names):
        raise SourceError(
            f"{path}, line 1: "
            + (f"no column {', '.join(sorted(missing))}" if missing else "two columns have one name"),
            remedy="the first line names the columns, file_name and text among them",
        )


def _read_text(path: Path) -> str:
    """UTF-8 with or without byte order mark. Raises SourceError that names the line of the first other byte."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SourceError(f"{path}, line {line}: not UTF-8", remedy="save the file as UTF-8") from error
