"""What the site adds to pages that can also be read in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
OUTSIDE = re.compile(r"\]\((?:\.\./)+(?P<path>examples/\w+\.py|CONTRIBUTING\.md|benchmarks/README\.md)\)")


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
    files.append(File("examples/quickstart.ipynb", root, config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Let links to files of the repository lead there, and links to the notebook to its page."""
    markdown = OUTSIDE.sub(lambda match: f"]({config.repo_url}/blob/main/{match['path']})", markdown)
    return markdown.replace("](../examples/quickstart.ipynb)", "](examples/quickstart.ipynb)")
