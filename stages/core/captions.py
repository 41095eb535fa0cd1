"""Captions of a source folder: `metadata.jsonl`, `metadata.csv` (file_name, text), or a `.txt` beside each picture.

A picture has one caption, or several: a list in metadata.jsonl. Every fault is named with its file and line; nothing is
guessed or dropped.
"""

import csv
import io
import json
import re
import unicodedata
from pathlib import Path, PurePosixPath
from typing import Any, cast

from stages.core.errors import SourceError

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
_LISTED = 10
# Unicode category Cc, but for tab, newline and carriage return.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def read_captions(folder: Path, pictures: list[str]) -> dict[str, list[str]]:
    """The captions of each picture in `pictures`: one or more, distinct, in the file's order.

    White space around a caption is removed. pictures: posix paths relative to `folder`.

    Raises SourceError that names the file and the line: a missing, empty or doubled caption, one that holds control
    characters, a listed picture that is not there, text that is not UTF-8.
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
    captions: dict[str, list[str]] = {}
    known = set(pictures)
    for line, row in rows:
        name, texts = _row_fields(path, line, row)
        if name in captions:
            raise SourceError(
                f"{path}, line {line}: {name} has a second line",
                remedy='keep one line for each picture; in metadata.jsonl "text" may be a list of captions',
            )
        if name not in known:
            raise SourceError(
                f"{path}, line {line}: {name} is not a picture in {folder}{_other_form(name, pictures)}",
                remedy="put the picture there, or correct or remove the line",
            )
        captions[name] = texts
    _refuse_missing(
        folder, [name for name in pictures if name not in captions], f"has no line in {path.name}"
    )
    return captions


def _other_form(name: str, pictures: list[str]) -> str:
    """A hint for names that look the same: macOS writes an accent as a character of its own."""
    normal = unicodedata.normalize("NFC", name)
    same = [other for other in pictures if unicodedata.normalize("NFC", other) == normal]
    return f" (the file is called {same[0]!a}, the line says {name!a})" if same else ""


def _from_sidecars(folder: Path, pictures: list[str]) -> dict[str, list[str]]:
    captions: dict[str, list[str]] = {}
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
        text = _read_text(path)
        for line, part in enumerate(text.split("\n"), start=1):
            _refuse_control(f"{path}, line {line}: the caption", part)
        if not text.strip():
            raise SourceError(f"{path} is empty", remedy="write the caption of the picture into it")
        captions[name] = [text.strip()]
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


def _row_fields(path: Path, line: int, row: dict[str, Any]) -> tuple[str, list[str]]:
    where = f"{path}, line {line}"
    for field, kinds in (("file_name", str), ("text", (str, list))):
        if not isinstance(row.get(field), kinds):
            raise SourceError(
                f"{where}: field {field!r} is {'missing' if field not in row else 'not text'}",
                remedy='each line needs "file_name" and "text"; in metadata.jsonl "text" may be a list',
            )
    name = PurePosixPath(row["file_name"])
    if name.is_absolute() or ".." in name.parts:
        raise SourceError(f"{where}: {name} leaves the folder", remedy="use paths inside the folder only")
    _refuse_surrogates(where, str(name))
    if isinstance(row["text"], str):
        return name.as_posix(), [_checked_text(where, f"the caption of {name}", row["text"])]
    return name.as_posix(), _checked_list(where, name, row["text"])


def _checked_list(where: str, name: PurePosixPath, values: list[Any]) -> list[str]:
    """The captions of one picture from the list in its line; they count from 1 in messages."""
    if not values:
        raise SourceError(f"{where}: the list of captions of {name} is empty", remedy="write one")
    texts: list[str] = []
    for number, value in enumerate(values, start=1):
        text = _checked_text(where, f"caption {number} of {name}", value)
        if text in texts:
            raise SourceError(
                f"{where}: captions {texts.index(text) + 1} and {number} of {name} are the same",
                remedy="remove one of them",
            )
        texts.append(text)
    return texts


def _checked_text(where: str, what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SourceError(f"{where}: {what} is not text", remedy="write each caption of the list as text")
    _refuse_surrogates(where, value)
    _refuse_control(f"{where}: {what}", value)
    if not value.strip():
        raise SourceError(f"{where}: {what} is empty", remedy="write one")
    return value.strip()


def _refuse_surrogates(where: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SourceError(
            f"{where}: half of a surrogate pair (\\ud800 to \\udfff)", remedy="correct the escape"
        )


def _refuse_control(what: str, text: str) -> None:
    """Judges the text as written: `strip` would take some control characters for white space."""
    found = _CONTROL.search(text)
    if found:
        raise SourceError(
            f"{what} holds the control character U+{ord(found[0]):04X}",
            remedy="remove it, or write the letter that was meant",
        )


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
