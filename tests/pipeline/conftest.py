"""One finished micro pipeline for all tests of this folder; each test works in a copy of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project import Project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after its first `dvc repro`. Read it, do not change it."""
    project = Project(tmp_path_factory.mktemp("finished") / "project")
    project.dvc("repro")
    project.run("git", "add", "-A")
    project.run("git", "commit", "-q", "-m", "first run")
    return project


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Callable[[], Project]:
    """Makes copies of the finished project, with its store and DVC cache."""

    def make() -> Project:
        return Project.copy_of(finished, tmp_path / f"copy-{len(list(tmp_path.iterdir()))}")

    return make
