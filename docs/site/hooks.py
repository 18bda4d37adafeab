"""What the site adds to pages that can also be read in the repository."""

import html as markup
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
OUTSIDE = re.compile(
    r"\]\((?:\.\./)+"
    r"(?P<path>examples/\w+\.py|CONTRIBUTING\.md|(?:benchmarks|tests(?:/\w+)?)/\w+\.md)\)"
)

PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'<img src="([^"]+)" alt="([^"]*)"></picture>'
)
ALERT = re.compile(r"^> \[!(WARNING|NOTE|TIP)\]\n((?:> .*\n)+)", re.MULTILINE)
TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->\n", re.DOTALL)
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r"^ *```.*?^ *```|`[^`\n]*`|\$([^$\n]+)\$", re.MULTILINE | re.DOTALL
)  # not in code

# The words of signatures, and the page and the section that says what they are.
MEANINGS = {
    "_core.aliases.Bound": ("reference/index.md", "bound"),
    "_core.aliases.Bounds": ("reference/index.md", "bound"),
    "_core.aliases.Axes": ("reference/index.md", "axes"),
    "_core.aliases.AutoAxes": ("reference/index.md", "axes"),
    "_core.aliases.Ord": ("reference/index.md", "ord"),
    "weights.box.Where": ("reference/index.md", "where"),
}

WORD = re.compile(r"<code>(?=[^<\s]{1,38}</code>)")

# A place in the list of all functions, and the functions of a page.
LISTED = re.compile(r"<!-- functions of ([\w-]+\.md) -->")
ENTRY = re.compile(r"^::: clipjax\.([\w.]+)$", re.MULTILINE)

# Code that is not pasted as it is shown: a diff, and the prompts of a docstring.
CODE = re.compile(
    r'<div class="language-(?P<language>diff|pycon) highlight">(?P<code>.*?)</div>',
    re.DOTALL,
)
TAG = re.compile(r"<[^>]+>")

# Scripts from other hosts, such as the MathJax that a notebook would load.
FOREIGN = re.compile(
    r"<script[^>]*(?:mathjax|src=.https?:)[^>]*>.*?</script>", re.DOTALL
)

PICTURE_ELSEWHERE = re.compile(r'<img alt="([^"]*)" src="https?:[^>]*>')

# Pages that were, and where their readers go.
MOVED = {
    "adaptive": "choosing",
    "benchmarks": "costs",
    "citation": "index",
    "concepts": "guarantees",
    "diagnose": "when-a-run-breaks",
    "faq": "index",
    "first-constraint": "constraints",
    "gallery": "index",
    "large-models": "many-devices",
    "logging": "log-and-draw",
    "stability": "running-job",
    "thresholds": "choosing",
}
MOVES = (
    '<!doctype html><meta charset="utf-8"><title>Moved</title>'
    '<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">Moved</a>\n'
)


def on_config(config: Any) -> Any:
    """Show the version in the header."""
    source = Path(config.config_file_path).parent / "clipjax" / "__init__.py"
    version = VERSION.search(source.read_text(encoding="utf-8"))
    config.site_name = f"{config.site_name} {version[1] if version else ''}".strip()
    return config


@event_priority(50)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Any, config: Any) -> Any:
    """Add the notebook, which lies with the examples."""
    root = str(Path(config.config_file_path).parent)
    files.append(
        File(
            "examples/quickstart.ipynb",
            root,
            config.site_dir,
            config.use_directory_urls,
        )
    )
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Turn what reads well in the repository into what reads well on the site.

    Links to files of the repository lead there, pictures with a dark version become two
    images, of which the site's button for dark mode shows one, alerts become
    admonitions, sections between `<!-- tabs -->` and `<!-- end of tabs -->` become
    tabs, and formulas become MathML, which browsers draw without a script.
    """
    if LISTED.search(markdown):
        root = Path(config.config_file_path).parent
        package = griffe.load("clipjax", search_paths=[root], resolve_aliases=True)
        markdown = LISTED.sub(
            lambda match: _listed(match[1], package, config), markdown
        )
    markdown = OUTSIDE.sub(
        lambda match: f"]({config.repo_url}/blob/main/{match['path']})", markdown
    )
    markdown = markdown.replace(
        "](../examples/quickstart.ipynb)", "](examples/quickstart.ipynb)"
    )
    markdown = PICTURE.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", markdown)
    markdown = ALERT.sub(
        lambda match: (
            f"!!! {match[1].lower()}\n\n{_indented(match[2].replace('> ', ''))}\n"
        ),
        markdown,
    )
    markdown = TABS.sub(lambda match: SECTION.sub(_tab, match[1]), markdown)
    return FORMULA.sub(
        lambda match: convert(match[1]) if match[1] else match[0], markdown
    )


def _listed(page: str, package: griffe.Object, config: Any) -> str:
    """Return one line for each function of a page of the reference."""
    text = (Path(config.docs_dir) / "reference" / page).read_text(encoding="utf-8")
    lines = []
    for name in ENTRY.findall(text):
        found = package[name]
        if found.is_function and found.docstring:
            first = found.docstring.value.partition("\n")[0].rstrip(".")
            lines.append(f"- [`{name}`]({page}#clipjax.{name}): {_lower(first)}\n")
    return "".join(lines)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _tab(section: re.Match[str]) -> str:
    return f'=== "{section[1]}"\n\n{_indented(section[2])}\n\n'


def _indented(text: str) -> str:
    return textwrap.indent(text.strip(), "    ")


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Keep short code on one line, and link the words of signatures to their meaning.

    `Bound`, `Axes` and their like stand in the signatures of most functions, and are
    explained once, in sections of the reference.
    """
    for word, (uri, section) in MEANINGS.items():
        if page.file.src_uri == uri:
            register = config.plugins["autorefs"].register_anchor
            register(page, f"clipjax.{word}", section)
    html = CODE.sub(_with_copy, html)
    return WORD.sub('<code class="whole">', html)


def _with_copy(block: re.Match[str]) -> str:
    """Tell the button of a block to copy what can be pasted."""
    lines = markup.unescape(TAG.sub("", block["code"])).splitlines()
    if block["language"] == "diff":
        kept = [line[1:] for line in lines if line and line[0] != "-"]
        kept = textwrap.dedent("\n".join(kept)).splitlines()
    else:
        kept = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
    copied = markup.escape("\n".join(kept))
    opening = f'<div class="language-{block["language"]} highlight"'
    return f'{opening} data-copy="{copied}">{block["code"]}</div>'


def on_post_page(output: str, **_: Any) -> str:
    """Load nothing from other hosts."""
    return PICTURE_ELSEWHERE.sub(r"\1", FOREIGN.sub("", output))


def on_post_build(config: Any, **_: Any) -> None:
    """Lead readers of pages that went to the pages that have their text."""
    for old, new in MOVED.items():
        folder = Path(config.site_dir) / old
        folder.mkdir(exist_ok=True)
        url = "../" if new == "index" else f"../{new}/"
        (folder / "index.html").write_text(MOVES.format(url=url))
