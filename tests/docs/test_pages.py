"""The pages: links, and lines of code. Sybil runs the code itself."""

import re
import tomllib
from pathlib import Path

import pytest

import clipjax
from clipjax import functional, plots

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFERENCE = ROOT / "docs" / "reference"
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the anchors of a page's headings."""
    text = BLOCK.sub("", page.read_text())
    explicit = re.findall(r"\{ ?#([\w-]+) ?\}", text)
    headings = re.findall(r"^#+ (.+?)(?: *\{.*\})?$", text, re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    )
    return {*explicit, *(re.sub(r"-+", "-", heading) for heading in plain)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md" and "reference" not in linked.parts:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_exist(page):
    """A picture of an example is in `<picture>`, which the site's hook knows."""
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r'(?:src|srcset)="([^"#]+)', text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_page(page):
    """The site shows 80 columns, and a phone 64."""
    wide = [
        line
        for _, code in BLOCK.findall(page.read_text())
        for line in code.splitlines()
        if len(line) > 80
    ]
    assert not wide


@pytest.mark.parametrize(
    "name", [name for name in clipjax.__all__ if getattr(clipjax, name).__doc__]
)
def test_code_of_docstrings_fits_the_page(name):
    lines = map(str.strip, getattr(clipjax, name).__doc__.splitlines())
    assert not [
        line for line in lines if line.startswith((">>>", "...")) and len(line) > 80
    ]


def test_the_reference_has_every_name():
    """Its index is made of these pages: see docs/site/hooks.py."""
    pages = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
    entries = {
        entry: page
        for page, text in pages.items()
        for entry in re.findall(r"^::: clipjax\.([\w.]+)$", text, re.MULTILINE)
    }
    modules = {"": clipjax, "functional.": functional, "plots.": plots}
    public = {f"{at}{name}" for at, each in modules.items() for name in each.__all__}
    assert public - entries.keys() == {"functional"}
    listed = re.findall(r"<!-- functions of (\S+) -->", pages["index.md"])
    assert {*entries.values()} == {*listed}


def test_numbers_in_the_prose_of_the_quickstart_are_those_of_its_code():
    """Sybil compares what the comments show with what the code prints."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    prose, code = BLOCK.sub("", page), "".join(each[1] for each in BLOCK.findall(page))
    _, _, prose = prose.partition("## A loop")  # after the versions
    numbers = re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.-]*\w)", prose)
    assert len(numbers) > 8
    assert not [each for each in numbers if not re.search(rf"\b{each}", code)]


def test_no_line_begins_with_a_formula():
    """Markdown would take it for a block, and end the paragraph before it."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"^\$", page.read_text(), re.MULTILINE), page


def test_versions_agree():
    assert f"version: {clipjax.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {re.escape(clipjax.__version__)}\b",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )


def test_the_commands_of_the_readme_name_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        each
        for group in re.findall(
            r'-e "\.\[([\w,-]+)\]"', (ROOT / "README.md").read_text()
        )
        for each in group.split(",")
    }
    assert named <= set(extras)


def test_the_readme_quotes_what_its_example_printed():
    """`examples/digits.py` writes the file beside its pictures."""
    printed = (ROOT / "docs" / "images" / "digits.txt").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    (caption,) = re.findall(r"\[start:caption\] -->(.*?)<!--", readme)
    means = re.findall(r"^  \S.*? +(\d+%) \(", printed, re.MULTILINE)
    assert len(means) == 3
    assert re.findall(r"\d+%", caption) == means


def test_every_page_of_the_site_is_listed_for_language_models():
    config = (ROOT / "mkdocs.yml").read_text()
    plan, _, rest = config.partition("theme:")
    page = r"(?<=[\s\[])[\w/*-]+\.md"
    pages = set(re.findall(page, plan.partition("nav:")[2])) - {"index.md"}
    listed = set(re.findall(page, rest.partition("llmstxt:")[2]))
    in_reference = {name for name in pages if name.startswith("reference/")}
    assert (listed - {"reference/*.md"}) | in_reference == pages
