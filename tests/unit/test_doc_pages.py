"""The pages in docs/ name settings, metrics, messages and files that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), ROOT / "k8s/README.md", ROOT / "tests/README.md"))
GUIDES = [ROOT / f"docs/{name}.md" for name in ("tuning", "troubleshooting", "failures")]
SOURCES = (
    "cli",
    "common",
    "engine",
    "fleet",
    "gateway",
    "kv_transfer",
    "pod",
    "prefill_service",
    "decode_service",
    "prefix_index",
)


@cache
def texts() -> str:
    """Returns all string constants of the sources, one a line; an f-string gives one line per constant part."""
    found = set()
    for package in SOURCES:
        for file in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text()))
            found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return "\n".join(found)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_in_the_text_exist(page: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_metrics_are_on_the_list_of_metrics(page: Path) -> None:
    listed = set(re.findall(r"^\| `(baton_\w+)`", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(baton_\w+)", page.read_text())) <= listed


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    files = [file for folder in ("common/settings", "cli") for file in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"[\w-]+", "\n".join(file.read_text() for file in files)))
    for flag in re.findall(r"--([a-z][a-z0-9-]+)", page.read_text()):
        name = flag.replace("-", "_")
        assert {name, name.removeprefix("no_"), f"--{flag}"} & words, flag


def test_quoted_messages_are_in_the_sources() -> None:
    """A capitalised word, `...` and a number in a quoted message stand for a value."""
    pages = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("troubleshooting", "failures"))
    quoted = re.findall(r"`([a-z]+(?: [^`]+)+)`", pages)
    messages = [text for text in quoted if not text.startswith("baton ")]
    assert len(messages) > 20
    for message in messages:
        for part in re.split(r"\.\.\.|\b[A-Z]{1,}\b(?::[A-Z]+)?|\d+", message):
            if len(fixed := part.strip(" :;,.()")) > 8:
                assert fixed in texts(), message
