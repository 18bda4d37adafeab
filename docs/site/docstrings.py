"""The docstrings as mkdocstrings reads them: roles and papers become links."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|data):`(?:clipjax\.)?(?P<name>[\w.]+)`")
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
SOURCE = "https://github.com/clipjax/clipjax/blob/main"
PROSE = re.compile(
    r"^(?P<title>Returns|References|See Also):\n(?P<text>(?: {2}.*\n?|\n(?= {2}))+)",
    re.MULTILINE,
)
# Words of signatures, and the headings on the reference's first page that explain them.
SHARED = {"Bound": "what-a-bound-may-be", "Axes": "what-axes-may-be"}
ERRORS = re.compile(r"^( +)TypeError, ValueError: ", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrite docstrings and signatures once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit every object of the package."""
        names = {str(name) for name in pkg.exports or ()}
        for room in ("functional", "flax", "equinox"):
            names |= {f"{room}.{name}" for name in pkg[room].exports or ()}

        def link(match: re.Match[str]) -> str:
            name = match["name"]
            return f"[`{name}`][clipjax.{name}]" if name in names else f"`{name}`"

        def visit(item: Any) -> None:
            if item.is_alias:
                return
            if item.docstring:
                text = ROLE.sub(link, item.docstring.value)
                text = PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
                for word, anchor in SHARED.items():
                    text = text.replace(f"`{word}`", f"[`{word}`](index.md#{anchor})")
                text = ERRORS.sub(r"\1TypeError or ValueError: ", text)
                text = PROSE.sub(
                    lambda m: f"**{m['title']}:** {' '.join(m['text'].split())}\n\n",
                    text,
                )
                text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
                if not item.is_module and item.parent.is_module:
                    lines = f"#L{item.lineno}-L{item.endlineno}"
                    file = item.relative_package_filepath
                    text += f"\n\n[Source]({SOURCE}/{file}{lines})"
                item.docstring.value = text
            for member in item.members.values():
                visit(member)

        visit(pkg)
