"""Shards with stable bytes; an index that notices every change."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stages.core.errors import StoreError
from stages.core.shards import (
    check_file,
    load_pt,
    open_index,
    pixel_key,
    pt_bytes,
    save_pt,
    shard_name,
    shard_of,
    stacked,
    unstacked,
    write_index,
)
from stages.core.store import sha256_bytes


def value() -> dict[str, object]:
    return {
        f"{n}": {"pixels": torch.arange(n + 3, dtype=torch.uint8), "box": [n, 2], "name": "x" * n}
        for n in range(4)
    }


def test_shard_is_the_first_32_bits_modulo() -> None:
    assert [shard_of(f"{n:08x}" + "f" * 56, 8) for n in (0, 7, 8, 0xFFFFFFFF)] == [0, 7, 0, 7]
    assert [shard_name(number, ".pt") for number in (0, 7, 10, 100)] == [
        "shard-00.pt", "shard-07.pt", "shard-10.pt", "shard-100.pt",
    ]  # fmt: skip


def test_pt_bytes_do_not_know_the_file_name(tmp_path: Path) -> None:
    save_pt(tmp_path / "a.pt", value())
    save_pt(tmp_path / "quite-another-name.pt", value())
    assert (
        (tmp_path / "a.pt").read_bytes()
        == (tmp_path / "quite-another-name.pt").read_bytes()
        == pt_bytes(value())
    )


def test_pictures_by_size(tmp_path: Path) -> None:
    pixels = {
        name: torch.full((3, height, 2), number, dtype=torch.uint8)
        for number, (name, height) in enumerate([("d", 4), ("a", 2), ("c", 4), ("b", 2)])
    }
    found = stacked(pixels)
    assert [size["ids"] for size in found] == [["a", "b"], ["c", "d"]]
    assert [tuple(size["pixels"].shape) for size in found] == [(2, 3, 2, 2), (2, 3, 4, 2)]
    save_pt(tmp_path / "a.pt", found)
    again = unstacked(load_pt(tmp_path / "a.pt", mmap=True))
    assert sorted(again) == ["a", "b", "c", "d"]
    assert all(torch.equal(again[name], pixels[name]) for name in pixels)
    assert stacked({}) == []
    assert unstacked([]) == {}


def test_pt_bytes_are_equal_in_another_process() -> None:
    code = (
        "import hashlib\nfrom tests.unit.core.test_shards import pt_bytes, value\n"
        "print(hashlib.sha256(pt_bytes(value())).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": "."},
    )  # fmt: skip
    assert done.stdout.strip() == sha256_bytes(pt_bytes(value()))


def test_what_was_loaded_is_saved_to_the_same_bytes(tmp_path: Path) -> None:
    """Outs are assembled from packs that were loaded or made just now: it must not show."""
    tensors = {
        sha256_bytes(str(n).encode()): torch.full((3, 4, n + 2), n, dtype=torch.uint8) for n in range(5)
    }
    save_pt(tmp_path / "a.pt", tensors)
    assert pt_bytes(load_pt(tmp_path / "a.pt")) == (tmp_path / "a.pt").read_bytes()


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code ran",))


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps(Evil()), pt_bytes(torch.ones(9))[:-40]])
def test_damaged_or_dangerous_files_are_refused(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(StoreError, match=r"a\.pt is damaged or not a plain tensor file"):
        load_pt(tmp_path / "a.pt")
    assert capsys.readouterr().out == ""


def test_pickled_code_in_a_pt_file_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Evil(), tmp_path / "a.pt")
    with pytest.raises(StoreError, match="damaged or not a plain tensor file"):
        load_pt(tmp_path / "a.pt")
    assert capsys.readouterr().out == ""


def test_a_missing_file_stays_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_pt(tmp_path / "a.pt")


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    for name in ("b.pt", "a.pt"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    write_index(tmp_path, {"format": 1, "items": [{"caption": "ü"}]}, ["b.pt", "a.pt"])
    return tmp_path


def test_index_round_trip(indexed: Path) -> None:
    index = open_index(indexed)
    assert index["items"] == [{"caption": "ü"}]
    assert index["files"] == {name: sha256_bytes(name.encode() * 100) for name in ("a.pt", "b.pt")}
    assert len(index["digest"]) == 64


def test_digest_follows_fields_and_files(indexed: Path) -> None:
    digests = {open_index(indexed)["digest"]}
    for fields, byte in (({"format": 2}, b"x"), ({"format": 1}, b"x"), ({"format": 1}, b"y")):
        (indexed / "a.pt").write_bytes(byte)
        write_index(indexed, fields, ["a.pt"])
        digests.add(open_index(indexed)["digest"])
    assert len(digests) == 4


def test_a_flipped_byte_names_its_file(indexed: Path) -> None:
    data = bytearray((indexed / "b.pt").read_bytes())
    data[50] ^= 1
    (indexed / "b.pt").write_bytes(data)
    index = open_index(indexed)
    assert check_file(indexed, index, "a.pt") == indexed / "a.pt"
    with pytest.raises(StoreError, match=r"b\.pt is missing or does not match its sha256 in .*index\.json"):
        check_file(indexed, index, "b.pt")


def test_a_missing_file_is_named(indexed: Path) -> None:
    (indexed / "a.pt").unlink()
    with pytest.raises(StoreError, match=r"a\.pt is missing or does not match"):
        check_file(indexed, open_index(indexed), "a.pt")


def test_a_file_that_the_index_does_not_name_is_refused(indexed: Path) -> None:
    (indexed / "c.pt").write_bytes(b"c")
    with pytest.raises(StoreError, match=r"c\.pt is missing or does not match"):
        check_file(indexed, open_index(indexed), "c.pt")


def test_key_of_pixels_is_the_sha256_over_shape_and_bytes() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    assert pixel_key(pixels) == sha256_bytes(b"(3, 2, 4)" + bytes(range(24)))
    # A shard that is memory-mapped may give views; the key is of what they show.
    assert pixel_key(pixels.flip(-1)) == sha256_bytes(
        b"(3, 2, 4)" + pixels.flip(-1).contiguous().numpy().tobytes()
    )


def test_without_an_index_the_folder_is_unfinished(indexed: Path) -> None:
    (indexed / "index.json").unlink()
    with pytest.raises(StoreError, match=r"index\.json is missing: .* was never finished"):
        open_index(indexed)


@pytest.mark.parametrize("spoil", ["caption", "cut", "digest", "list"])
def test_an_edited_index_is_noticed(indexed: Path, spoil: str) -> None:
    path = indexed / "index.json"
    index = json.loads(path.read_text())
    if spoil == "caption":
        index["items"][0]["caption"] = "another"
    if spoil == "digest":
        del index["digest"]
    text = "[]" if spoil == "list" else json.dumps(index)
    path.write_text(text[:-9] if spoil == "cut" else text)
    with pytest.raises(StoreError, match=r"index\.json does not match its own digest"):
        open_index(indexed)
