"""Bad input through the whole pipeline: one clear error with the culprit and the remedy, and nothing lost."""

from collections.abc import Callable

import pytest

from tests.project import Project

pytestmark = pytest.mark.slow


def broken_parameter(project: Project) -> None:
    project.set("learning_rate: 1.5e-3", "learnin_rate: 1.5e-3")


def missing_caption(project: Project) -> None:
    path = project.root / "data/pictures/metadata.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")


def unreadable_pictures(project: Project) -> None:
    for path in sorted((project.root / "data/pictures").glob("*.png"))[:3]:
        path.write_bytes(b"\x89PNG not really")


def missing_base(project: Project) -> None:
    (project.root / "data/embedded/tiny-sd/unet/diffusion_pytorch_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "stage", "messages"),
    [
        (
            broken_parameter,
            "train",
            [
                "params.yaml: train.learnin_rate is unknown; did you mean learning_rate?",
                "learning_rate is missing",
            ],
        ),
        (missing_caption, "ingest", ["1 picture(s) without caption", "has no line in metadata.jsonl"]),
        (
            unreadable_pictures,
            "ingest",
            ["3 of 24 pictures cannot be used, more than ingest.max_quarantined_percent", "unreadable"],
        ),
        (missing_base, "base", ["unet has no .safetensors weights", "remedy:"]),
    ],
)
def test_bad_input_is_named_and_loses_nothing(
    copy: Callable[[], Project], spoil: Callable[[Project], None], stage: str, messages: list[str]
) -> None:
    project = copy()
    before = project.lock
    spoil(project)
    output = project.dvc("repro", stage, code=255)
    for message in messages:
        assert message in output
    assert "Traceback" not in output
    assert project.lock == before
    assert project.run("git", "status", "--short", "dvc.lock") == ""
