"""What the documentation says exists: commands, paths, links, fields; and it names no machine and no registry."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from stages.cli import main
from stages.harness.closure import PROJECT
from stages.harness.config import flatten
from tests.project import project_files

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
IN_PROJECT = ("stages/", "data/embedded", "params/", "docs/", "tests/")
# Words of a command line that are not names: options, values, what the reader fills in.
COMMAND = re.compile(r"python -m stages\.cli((?: +[a-z][a-z-]*)+)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Written in parts: this file is tracked too.
REGISTRIES = (
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("download.pytorch", "org"),
    ("registry.npmjs", "org"),
    ("anaconda", "org"),
    ("conda-forge", "org"),
)
MACHINE_PATH = re.compile(r"(?<![\w.~$})/-])/(?:work|root|tmp)/[\w.]+")


def tracked() -> list[Path]:
    """The project's files, as paths."""
    return [PROJECT / name for name in project_files()]


PAGES = sorted(path for path in tracked() if path.suffix == ".md")
GUIDES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]


def name_of(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def in_backticks(text: str) -> list[str]:
    """Inline code; fenced blocks are left out."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    code = "\n".join(
        [*in_backticks(page.read_text()), *(body for _, body in FENCE.findall(page.read_text()))]
    )
    named = set(re.findall(r"\bmake ([a-z]+)", code))
    assert named, "no `make` command was found: does the pattern still fit?"
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    missing: list[str] = []
    for code in in_backticks(page.read_text()):
        if code.startswith(IN_PROJECT) and not re.search(r"[<>$ ]", code):
            found = list(PROJECT.glob(code)) if "*" in code else (PROJECT / code).exists()
            if not found:
                missing.append(code)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for words in COMMAND.findall(page.read_text()):
        command: click.Command = main
        for word in words.split():
            if not isinstance(command, click.Group):
                break  # an argument
            assert word in command.commands, f"python -m stages.cli{words}: no command {word!r}"
            command = command.commands[word]
        assert not isinstance(command, click.Group), f"python -m stages.cli{words} only prints its help"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    missing: list[str] = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = page.parent / place if place else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_snippets_compile(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(body, filename=name_of(page))


def test_readme_has_what_error_messages_point_to() -> None:
    found = anchors(PROJECT / "README.md")
    for path in sorted((PROJECT / "stages").rglob("*.py")):
        for heading in re.findall(r"README, '([^']+)'", path.read_text()):
            assert heading.lower().replace(" ", "-") in found, f"{name_of(path)} points to {heading!r}"


def test_pages_that_error_messages_name_exist() -> None:
    for path in sorted((PROJECT / "stages").rglob("*.py")):
        for page in re.findall(r"\bdocs/[\w/.-]+\.md", path.read_text()):
            assert (PROJECT / page).is_file(), f"{name_of(path)} names {page}"


def test_every_parameter_is_documented_and_nothing_else() -> None:
    params = YAML(typ="safe").load(PROJECT / "params.yaml")
    rows = re.findall(r"^\| `([\w.]+)` \|", (PROJECT / "docs" / "params.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(flatten(params))


def codes(function: str) -> set[str]:
    """The first arguments of all calls of `function` in the stages and in core, where they are texts."""
    files = [*(PROJECT / "stages").glob("*.py"), *(PROJECT / "stages" / "core").rglob("*.py")]
    calls = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
    ]
    first = [call.args[0] for call in calls if call.args and ast.unparse(call.func) == function]
    return {node.value for node in first if isinstance(node, ast.Constant)}


def test_every_reason_and_repair_is_documented() -> None:
    text = (PROJECT / "docs" / "formats.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (?:ingest|preprocess)", text, re.MULTILINE))
    assert rows - {"same_bytes"} == codes("PictureError")
    assert codes("repairs.append") <= set(in_backticks(text))


def test_every_stage_is_in_the_readme() -> None:
    stages = YAML(typ="safe").load(PROJECT / "dvc.yaml")["stages"]
    rows = re.findall(r"^\| (\w+) \|", (PROJECT / "README.md").read_text(), re.MULTILINE)
    assert [row for row in rows if row in stages] == list(stages)


def text_lines() -> Iterator[tuple[str, str]]:
    """(place, line) of all text files, those of the tests excepted: they may make such names up."""
    for path in tracked():
        if path.is_relative_to(PROJECT / "tests"):
            continue
        data = path.read_bytes()
        if b"\0" in data[:8000]:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            yield f"{name_of(path)}:{number}", line


def test_no_file_names_a_machines_path_or_a_registry() -> None:
    hosts = re.compile("|".join(re.escape(".".join(parts)) for parts in REGISTRIES))
    found = [
        f"{place}: {line.strip()[:120]}"
        for place, line in text_lines()
        if MACHINE_PATH.search(line) or hosts.search(line)
    ]
    assert found == []
