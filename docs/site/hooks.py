"""What the site adds to pages that can also be read in the repository."""

import re
import textwrap
from pathlib import Path
from typing import Any

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
    "weights.projection.Projection": ("reference/weights.md", "projections"),
}

WORD = re.compile(r"<code>(?=[^<\s]{1,38}</code>)")


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
    return WORD.sub('<code class="whole">', html)
