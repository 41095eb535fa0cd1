"""Captions from each source, and every fault with its file and line."""

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest

from stages.core.captions import read_captions
from stages.core.errors import SourceError


def folder(root: Path, *names: str, **texts: bytes) -> Path:
    """Empty pictures `names`; `metadata_jsonl=b"..."` writes metadata.jsonl."""
    root.mkdir(exist_ok=True)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    for name, data in texts.items():
        (root / name.replace("_", ".")).write_bytes(data)
    return root


def line(name: str, text: object) -> bytes:
    return json.dumps({"file_name": name, "text": text}).encode()


# --- good captions


def test_jsonl_with_bom_crlf_blank_lines_and_more_fields(tmp_path: Path) -> None:
    data = (
        b"\xef\xbb\xbf"
        + line("a b.png", " red\n")
        + b'\r\n\r\n{"file_name": "./s/\xc3\xbc.png", "text": "blue", "x": 1}\r\n'
    )
    folder(tmp_path, metadata_jsonl=data)
    assert read_captions(tmp_path, ["a b.png", "s/ü.png"]) == {"a b.png": ["red"], "s/ü.png": ["blue"]}


def test_csv_with_quotes_newlines_and_another_column(tmp_path: Path) -> None:
    data = b'text,source,file_name\r\n"one, ""two""\nthree",x,a.png\r\n\r\nplain,y,b.png\r\n'
    folder(tmp_path, metadata_csv=data)
    assert read_captions(tmp_path, ["a.png", "b.png"]) == {"a.png": ['one, "two"\nthree'], "b.png": ["plain"]}


def test_sidecars(tmp_path: Path) -> None:
    folder(tmp_path, "s/a.b.png", "s/a.b.txt", "c.JPG", "c.txt", "README.txt")
    (tmp_path / "s" / "a.b.txt").write_bytes(b"\xef\xbb\xbf dotted \r\n")
    (tmp_path / "c.txt").write_text("ünï")
    assert read_captions(tmp_path, ["c.JPG", "s/a.b.png"]) == {"c.JPG": ["ünï"], "s/a.b.png": ["dotted"]}


def test_a_list_keeps_its_order_and_what_differs_in_case_or_form(tmp_path: Path) -> None:
    data = line("a.png", ["z", " a\n", "A", "é", "e\u0301"]) + b"\n" + line("b.png", ["one"])
    folder(tmp_path, metadata_jsonl=data)
    assert read_captions(tmp_path, ["a.png", "b.png"]) == {
        "a.png": ["z", "a", "A", "é", "e\u0301"],
        "b.png": ["one"],
    }


def test_a_list_in_csv_and_in_a_text_file_is_one_caption(tmp_path: Path) -> None:
    folder(tmp_path / "csv", metadata_csv=b'file_name,text\na.png,"[""one"", ""two""]"\n')
    assert read_captions(tmp_path / "csv", ["a.png"]) == {"a.png": ['["one", "two"]']}
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read_captions(tmp_path, ["a.png"]) == {"a.png": ["one\ntwo"]}


def test_tabs_and_line_breaks_are_text(tmp_path: Path) -> None:
    text = "one\ttwo\r\nthree\rfour"
    folder(tmp_path / "jsonl", metadata_jsonl=line("a.png", [text]))
    folder(tmp_path / "csv", metadata_csv=f'file_name,text\na.png,"{text}"\n'.encode())
    folder(tmp_path / "txt")
    (tmp_path / "txt" / "a.txt").write_bytes(text.encode())
    for form in ("jsonl", "csv", "txt"):
        assert read_captions(tmp_path / form, ["a.png"]) == {"a.png": [text]}


# --- faults, by line


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            line("a.png", "x") + b"\n" + line("a.png", "y"),
            r"jsonl, line 2: a\.png has a second line\n  remedy: keep one",
        ),
        (line("a.png", "x") + b"\n\n" + line("b.png", "y"), r"jsonl, line 3: b\.png is not a picture in "),
        (line("a.png", " \t"), r"jsonl, line 1: the caption of a\.png is empty"),
        (line("a.png", 7), r"jsonl, line 1: field 'text' is not text"),
        (line("a.png", None), r"jsonl, line 1: field 'text' is not text"),
        (b'{"file_name": ["a.png"], "text": "x"}', r"jsonl, line 1: field 'file_name' is not text"),
        (b'{"text": "x"}', r"jsonl, line 1: field 'file_name' is missing"),
        (line("../a.png", "x"), r"jsonl, line 1: \.\./a\.png leaves the folder"),
        (line("s/../../a.png", "x"), r"jsonl, line 1: s/\.\./\.\./a\.png leaves the folder"),
        (line("/etc/a.png", "x"), r"jsonl, line 1: /etc/a\.png leaves the folder"),
        (b"[1]", r"jsonl, line 1: not a JSON object"),
        (line("a.png", "x") + b"\n{'text': 1}", r"jsonl, line 2: not JSON \("),
        (
            b'{"file_name": "a.png", "text": "x", "text": "y"}',
            r"line 1: not JSON \(a field stands there twice\)",
        ),
        (line("a.png", "x") + b'\n\n{"text": "caf\xe9"}', r"jsonl, line 3: not UTF-8"),
        (b'{"file_name": "a.png", "text": "\\ud800"}', r"jsonl, line 1: half of a surrogate pair"),
        (b'{"file_name": "\\udfff.png", "text": "x"}', r"jsonl, line 1: half of a surrogate pair"),
        (b'{"file_name": "a.png", "text": ["x", "\\udc00"]}', r"jsonl, line 1: half of a surrogate pair"),
        (
            line("a.png", {"en": "x"}),
            r"line 1: field 'text' is not text\n  remedy: .*\"text\" may be a list$",
        ),
        (line("a.png", []), r"jsonl, line 1: the list of captions of a\.png is empty\n  remedy: write one$"),
        (
            line("a.png", ["x", ["y"]]),
            r"jsonl, line 1: caption 2 of a\.png is not text\n  remedy: write each caption of the list as text$",
        ),
        (line("a.png", [None]), r"jsonl, line 1: caption 1 of a\.png is not text"),
        (line("a.png", ["x", " \n"]), r"jsonl, line 1: caption 2 of a\.png is empty\n  remedy: write one$"),
        (
            b"\n" + line("a.png", ["x", "y", " x "]),
            r"jsonl, line 2: captions 1 and 3 of a\.png are the same\n  remedy: remove one of them$",
        ),
        (
            line("a.png", "x") + b"\n" + line("b.png", ["x", "y\x07"]),
            r"line 2: caption 2 of b\.png holds the control character U\+0007\n  remedy: remove it, or write the letter",
        ),
    ],
)
def test_jsonl_faults(tmp_path: Path, data: bytes, message: str) -> None:
    folder(tmp_path, "a.png", metadata_jsonl=data)
    with pytest.raises(SourceError, match=message):
        read_captions(tmp_path, ["a.png"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # The second row begins on line 4: the first one's caption runs over two lines, and one is blank.
        (b'file_name,text\na.png,"one\ntwo"\n\na.png,again\n', r"csv, line 5: a\.png has a second line"),
        (
            b'file_name,text\na.png,"one\ntwo"\n"b.png","three\nfour"\n',
            r"csv, line 4: b\.png is not a picture",
        ),
        (b"file_name,text\na.png\n", r"csv, line 2: field 'text' is missing"),
        (b"file_name,text\na.png,red, round\n", r"csv, line 2: 3 fields for 2 columns"),
        (b'file_name,text\na.png,x\na.png,"never closed\n', r"csv, line 3: unexpected end of data"),
        (b"file,text\na.png,x\n", r"csv, line 1: no column file_name"),
        (b"", r"csv, line 1: no column file_name, text"),
        (b"file_name,text,text\na.png,x,y\n", r"csv, line 1: two columns have one name"),
        (b"file_name,text\na.png,caf\xe9\n", r"csv, line 2: not UTF-8"),
        (
            b"file_name,text\n\na.png,one\xc2\x92s\n",
            r"csv, line 3: the caption of a\.png holds the control character U\+0092",
        ),
    ],
)
def test_csv_faults(tmp_path: Path, data: bytes, message: str) -> None:
    folder(tmp_path, "a.png", metadata_csv=data)
    with pytest.raises(SourceError, match=message):
        read_captions(tmp_path, ["a.png"])


def test_every_control_character_is_refused_also_where_it_could_pass_for_white_space(tmp_path: Path) -> None:
    letters = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cc"]
    assert len(letters) == 65
    for letter in sorted(set(letters) - set("\t\n\r")):
        folder(tmp_path, metadata_jsonl=line("a.png", f"x{letter}"))
        message = rf"the caption of a\.png holds the control character U\+{ord(letter):04X}\n"
        with pytest.raises(SourceError, match=message):
            read_captions(tmp_path, ["a.png"])


def test_pictures_without_a_line_are_counted_and_listed(tmp_path: Path) -> None:
    names = [f"{n:02d}.png" for n in range(12)]
    folder(tmp_path, metadata_jsonl=line("00.png", "x"))
    message = r"11 picture\(s\) without caption \(01\.png, .*, 10\.png and 1 more\): each has no line in metadata\.jsonl"
    with pytest.raises(SourceError, match=message):
        read_captions(tmp_path, names)


def test_two_metadata_files(tmp_path: Path) -> None:
    folder(tmp_path, metadata_jsonl=b"", metadata_csv=b"")
    with pytest.raises(
        SourceError, match=r"holds metadata\.jsonl and metadata\.csv\n  remedy: keep one of them"
    ):
        read_captions(tmp_path, ["a.png"])


def test_another_unicode_form_of_a_name_is_explained(tmp_path: Path) -> None:
    nfd = unicodedata.normalize("NFD", "é.png")
    folder(tmp_path, metadata_jsonl=line("é.png", "x"))
    message = re.escape(r"(the file is called 'e\u0301.png', the line says '\xe9.png')")
    with pytest.raises(SourceError, match=message):
        read_captions(tmp_path, [nfd])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            {},
            r"2 picture\(s\) without caption \(a\.png, b\.png\): each has no caption: there is no metadata\.jsonl",
        ),
        ({"a.txt": b"x", "b.txt": b" \n"}, r"b\.txt is empty"),
        ({"a.txt": b"x\n\xe9", "b.txt": b"x"}, r"a\.txt, line 2: not UTF-8"),
        (
            {"a.txt": b"x\n\ny\x0cz", "b.txt": b"x"},
            r"a\.txt, line 3: the caption holds the control character U\+000C",
        ),
    ],
)
def test_sidecar_faults(tmp_path: Path, texts: dict[str, bytes], message: str) -> None:
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        read_captions(tmp_path, ["a.png", "b.png"])


def test_one_sidecar_for_two_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SourceError, match=r"a\.txt stands beside a\.jpg and a\.png"):
        read_captions(tmp_path, ["a.jpg", "a.png"])


def test_metadata_and_text_files_together_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, "a.png", "b.png", metadata_jsonl=line("a.png", "one") + b"\n" + line("b.png", "two"))
    (tmp_path / "b.txt").write_text("another")
    with pytest.raises(
        SourceError, match=r"holds metadata\.jsonl, and 1 picture\(s\) have a \.txt as well \(b\.png"
    ):
        read_captions(tmp_path, ["a.png", "b.png"])


def test_a_text_file_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    source = folder(tmp_path / "source", "a.png")
    (source / "a.txt").symlink_to(secret)
    with pytest.raises(SourceError, match=r"a\.txt is a link out of"):
        read_captions(source, ["a.png"])
