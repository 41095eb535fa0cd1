"""Which files are pictures, and every one that cannot be, by its name."""

from pathlib import Path

import pytest

from stages.core.errors import SourceError
from stages.core.pictures import picture_files


def folder(root: Path, *names: str) -> Path:
    """Empty files `names` under `root`, which is returned."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def test_pictures_are_sorted_relative_and_of_any_case(tmp_path: Path) -> None:
    folder(tmp_path, "b.PNG", "a dir/ü é.JpEg", "a.txt", ".hidden.png", ".git/c.png", "z.webp", "notes.md")
    (tmp_path / "folder.png").mkdir()
    assert picture_files(tmp_path) == ["a dir/ü é.JpEg", "b.PNG", "z.webp"]


def test_missing_folder_names_the_three_remedies(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere is missing") as caught:
        picture_files(tmp_path / "nowhere")
    for remedy in ("put your pictures there", "sample-data", "dvc pull"):
        assert remedy in caught.value.remedy


def test_folder_without_pictures(tmp_path: Path) -> None:
    folder(tmp_path, "a.txt")
    with pytest.raises(SourceError, match=r"holds no pictures \(\.png, \.jpg"):
        picture_files(tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_links_to_pictures(tmp_path: Path, inside: bool) -> None:
    source = folder(tmp_path / "source", "a.png")
    folder(tmp_path, "out.png")
    (source / "link.png").symlink_to(source / "a.png" if inside else tmp_path / "out.png")
    if inside:
        assert picture_files(source) == ["a.png", "link.png"]
        return
    with pytest.raises(SourceError, match=r"source/link\.png is a link out of .*source"):
        picture_files(source)


def test_links_to_nothing_and_to_folders_are_named_not_skipped(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "a.png", "sub/b.png")
    (source / "gone.png").symlink_to(source / "no-such.png")
    with pytest.raises(SourceError, match=r"gone\.png is a link to nothing"):
        picture_files(source)
    (source / "gone.png").unlink()
    (source / "linked").symlink_to(source / "sub")
    with pytest.raises(SourceError, match=r"linked is a link to a folder"):
        picture_files(source)


def test_a_picture_of_an_unread_kind_is_named_not_skipped(tmp_path: Path) -> None:
    folder(tmp_path, "a.png", "b.HEIC")
    with pytest.raises(SourceError, match=r"b\.HEIC is of a kind that is not read \(\.heic\)"):
        picture_files(tmp_path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    try:
        (tmp_path / "caf\udce9.png").write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(SourceError, match=r"the file name 'caf\\udce9\.png' is not UTF-8"):
        picture_files(tmp_path)
