"""params.yaml: complete, strict, and everything wrong at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import ConfigError
from stages.harness.config import flatten, load_section, load_shared, parse, read_params


@dataclass(frozen=True, kw_only=True)
class Inner:
    rank: int
    targets: list[str]


@dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int
    learning_rate: float
    method: str
    checkpointing: bool
    gamma: float | None
    sizes: list[int]
    inner: Inner


GOOD: dict[str, Any] = {
    "steps": 3,
    "learning_rate": 1e-5,
    "method": "lora",
    "checkpointing": False,
    "gamma": None,
    "sizes": [1, 2],
    "inner": {"rank": 4, "targets": ["to_q"]},
}


def test_good() -> None:
    assert parse(GOOD, Outer, where="train") == Outer(
        steps=3,
        learning_rate=1e-5,
        method="lora",
        checkpointing=False,
        gamma=None,
        sizes=[1, 2],
        inner=Inner(rank=4, targets=["to_q"]),
    )


@pytest.mark.parametrize(
    ("field", "value"), [("gamma", 5.0), ("gamma", 5), ("learning_rate", 1), ("sizes", [])]
)
def test_also_good(field: str, value: object) -> None:
    found = getattr(parse(GOOD | {field: value}, Outer, where="train"), field)
    assert found == value
    assert isinstance(found, float | list)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "3", r"steps is '3', expected int"),
        ("steps", 3.0, r"steps is 3\.0, expected int"),
        ("steps", True, r"steps is True, expected int"),
        ("steps", None, r"steps is None, expected int"),
        ("learning_rate", "1e-5", r"learning_rate is the text '1e-5'; write it with a point, as 1\.0e-5"),
        ("learning_rate", "fast", r"learning_rate is 'fast', expected float"),
        ("learning_rate", True, r"learning_rate is True, expected float"),
        ("learning_rate", float("nan"), r"learning_rate is nan, expected float"),
        ("learning_rate", float("inf"), r"learning_rate is inf, expected float"),
        ("gamma", "5e0", r"gamma is the text '5e0'; write it with a point"),
        ("gamma", True, r"gamma is True, expected float \| None"),
        ("method", 64, r"method is 64, expected str"),
        ("method", False, r"method is False, expected str"),
        ("method", None, r"method is None, expected str"),
        (
            "method",
            "${shared.method}",
            r"method is '\$\{shared\.method\}'; write the value itself, DVC does not follow",
        ),
        ("checkpointing", 1, r"checkpointing is 1, expected bool"),
        ("checkpointing", "true", r"checkpointing is 'true', expected bool"),
        ("sizes", 1, r"sizes is 1, expected list\[int\]"),
        ("sizes", [1, "2"], r"sizes is \[1, '2'\], expected list\[int\]"),
        ("sizes", [1.5], r"sizes is \[1\.5\], expected list\[int\]"),
        ("sizes", ["${a}"], r"sizes is \['\$\{a\}'\]; write the value itself"),
        ("inner", None, r"inner should hold fields, but is None"),
        ("inner", {"rank": "4", "targets": []}, r"inner\.rank is '4', expected int"),
        ("inner", {"rank": 4}, r"inner\.targets is missing"),
        ("inner", {"rank": 4, "targets": [1]}, r"inner\.targets is \[1\], expected list\[str\]"),
    ],
)
def test_wrong(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^params\.yaml: train\.{message}") as caught:
        parse(GOOD | {field: value}, Outer, where="train")
    assert caught.value.message.count("params.yaml") == 1


def test_all_problems_in_one_error() -> None:
    wrong: dict[Any, Any] = {**GOOD, "learnin_rate": 1.0, "steps": True, "zzz": 1, 7: 1}
    del wrong["learning_rate"]
    wrong["inner"] = {"rnk": 4, "targets": ["a"]}
    with pytest.raises(ConfigError) as caught:
        parse(wrong, Outer, where="train")
    assert caught.value.message.splitlines() == [
        "params.yaml: train.learnin_rate is unknown; did you mean learning_rate?",
        "  params.yaml: train.zzz is unknown",
        "  params.yaml: train.7 is unknown",
        "  params.yaml: train.steps is True, expected int",
        "  params.yaml: train.learning_rate is missing",
        "  params.yaml: train.inner.rnk is unknown; did you mean rank?",
        "  params.yaml: train.inner.rank is missing",
    ]
    assert caught.value.remedy == "correct params.yaml; docs/params.md explains every field"


def test_section_missing() -> None:
    with pytest.raises(
        ConfigError, match=r"params\.yaml has no section 'train'\n  remedy: add it; its fields: rank, targets"
    ):
        load_section({}, "train", Inner)


SHARED = {"seed": 1, "device": "cpu", "runtime": "native", "determinism": {"mode": "portable", "threads": 1}}


def test_shared() -> None:
    shared = load_shared({**SHARED, "train": "judged by its own stage"})
    assert (shared.seed, shared.device, shared.runtime) == (1, "cpu", "native")
    assert (shared.determinism.mode, shared.determinism.threads) == ("portable", 1)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"device": "auto"},
            ["params.yaml: device is 'auto'; set cpu or cuda: the choice is part of the result"],
        ),
        ({"runtime": "docker"}, ["params.yaml: runtime is 'docker'; set native or container"]),
        ({"device": "gpu", "runtime": ""}, ["device is 'gpu'", "runtime is ''"]),
        ({"sed": 1}, ["params.yaml: sed is unknown; did you mean seed?"]),
        ({"trian": {}}, ["params.yaml: trian is unknown; did you mean train?"]),
        (
            {"seed": "1", "determinism": {"mode": 1}},
            ["seed is '1', expected int", "determinism.mode is 1", "threads is missing"],
        ),
    ],
)
def test_shared_refused(change: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_shared(SHARED | change)
    for message in messages:
        assert message in caught.value.message


def test_shared_missing() -> None:
    with pytest.raises(ConfigError, match=r"^params\.yaml: device is missing"):
        load_shared({name: value for name, value in SHARED.items() if name != "device"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: [1\n", r"params\.yaml, line 3: expected ',' or '\]'"),
        (b"a: 1\nb: 2\na: 3\n", r"params\.yaml, line 3: found duplicate key \"a\""),
        (b"- 1\n", r"params\.yaml holds no sections"),
        (b"", r"params\.yaml holds no sections"),
        (b"a: caf\xe9\n", r"params\.yaml: .*unacceptable character"),
        (b"a: \x00\n", r"params\.yaml: .*special characters are not allowed"),
    ],
)
def test_not_yaml(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "params.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_params(tmp_path / "params.yaml")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"params\.yaml is missing\n  remedy: run this at the top of a clone"
    ):
        read_params(tmp_path / "params.yaml")


def test_flatten() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": None}) == {
        "a.b.c": 1,
        "a.d": [1, {"e": 2}],
        "f": None,
    }
