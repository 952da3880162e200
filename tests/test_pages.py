"""The pages hang together: every public name has its place, every link and every test they name exists."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType

import pytest
from test_docs import public

from roughflow import datasets, plots

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def without_code(text):
    """A fenced block has no links, headings or claims."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text, level="#+"):
    """Those that MkDocs and GitHub give to the headings of a page, which agree for plain words."""
    headings = re.findall(rf"^{level} (.+)$", without_code(text), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_every_public_name_is_on_one_page_of_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    name = r"^::: roughflow\.(?:(?!datasets|plots|report)[a-z]+\.)?(\w+)$"
    shown = Counter(re.findall(name, text, flags=re.MULTILINE))
    assert [name for name, count in shown.items() if count > 1] == []
    assert set(shown) - {"datasets", "plots"} == set(public())


@pytest.mark.parametrize("module", [datasets, plots], ids=["datasets", "plots"])
def test_the_datasets_and_plots_are_all_on_their_page(module):
    name = module.__name__.rpartition(".")[2]
    text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^::: roughflow\.{name}\.(\w+)$", text, flags=re.MULTILINE)
    kinds = (type, FunctionType) if module is datasets else FunctionType
    public = getattr(module, "__all__", vars(module))
    assert sorted(shown) == sorted(name for name in public if isinstance(vars(module)[name], kinds))


def test_every_page_is_in_the_navigation_and_exists():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    files = re.findall(r": (\S+\.md)$", nav, flags=re.MULTILINE)
    assert len(files) == len(set(files))
    assert set(files) == {page.relative_to(DOCS).as_posix() for page in PAGES[1:]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_messages_and_the_faq_name_one_another():
    """What a message refers to is there, and nothing is explained that no message refers to."""
    calls = [
        node
        for file in (ROOT / "roughflow").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see"
    ]
    named = {node.args[0].value for node in calls}
    messages = (
        (DOCS / "faq.md").read_text(encoding="utf-8").partition("## Questions")[2].partition("\n## ")[2]
    )
    explained = anchors(messages, "###")
    assert named == explained


def test_the_benchmarks_that_are_named_exist():
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    known = re.findall(r"^  (\w+)  ", listed.stdout, flags=re.MULTILINE)
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"make bench NAME=(\w+)", text))
    assert named
    assert named <= set(known)


@pytest.mark.parametrize("name", ["theory", "errata"])
def test_the_tests_that_are_named_exist(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", text)
    assert named
    there = {file: _functions(ROOT / "tests" / file) for file, _ in named}
    assert [f"{file}::{test}" for file, test in named if test not in there[file]] == []


def _functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
