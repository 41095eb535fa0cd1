"""The picture files of a source folder, by their names and links alone; no file is opened."""

from pathlib import Path

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
