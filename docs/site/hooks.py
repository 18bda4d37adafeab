"""What the site does to pages that are written for a code host, where they can be read as well."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
# The README is for a code host; its place on the site is the home page.
ON_THE_SITE = {"README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
PICTURE = re.compile(r"^(!\[[^\]]*\]\((\S+)\))$", re.MULTILINE)
FENCE = re.compile(r"^(?P<mark>`{3,}|~{3,}).*?^(?P=mark)\s*$", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"<!--- invisible-code-block:.*?--->\n*", re.DOTALL)


def on_config(config: Any) -> Any:
    """Take the addresses from the package's metadata.

    Not as `repo_url`, for whose sake the theme would ask the code host how many stars there are.
    """
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    urls = {name.lower(): url.rstrip("/") for name, url in urls.items()}
    config.site_url = config.site_url or urls.get("documentation")
    if repository := urls.get("repository") or urls.get("source") or urls.get("homepage"):
        config.extra["repository"] = repository
        config.extra["social"] = [
            {"icon": "fontawesome/solid/code-branch", "link": repository, "name": "Source"}
        ]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leave out what is only for the tests, and let links to files of the repository lead to it."""
    del files
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(match: re.Match[str]) -> str:
        label, target = match["label"], match["target"]
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            return match[0]
        path = posixpath.normpath(posixpath.join(here, parts.path))
        if path.startswith("docs/"):
            return match[0]
        section = f"#{parts.fragment}" if parts.fragment else ""
        if path in ON_THE_SITE:
            up = posixpath.relpath(posixpath.join("docs", ON_THE_SITE[path]), here)
            return f"[{label}]({up}{section})"
        repository = config.extra.get("repository")
        if not repository:  # nobody can follow it
            return label
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{label}]({repository}/{kind}/main/{path}{section})"

    def prose(text: str) -> str:
        text = LINK.sub(outside, text).replace(r"\<", "&lt;")  # an escape that Python-Markdown does not know
        return PICTURE.sub(r"[\1](\2)", text)  # to be looked at by itself, on a narrow screen

    markdown = HIDDEN.sub("", markdown)
    done, written = 0, []
    for fence in FENCE.finditer(markdown):  # code stays as it is
        written += [prose(markdown[done : fence.start()]), fence[0]]
        done = fence.end()
    return "".join([*written, prose(markdown[done:])])
