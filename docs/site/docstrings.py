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
# Words of signatures, which hooks.py links to the sections that explain them.
WORD = re.compile(
    r"(?<![\[`])`(?P<name>Bounds?|Axes|Where|Ord|BadStep|Violation|Cause)`(?!`)"
)
WORDS = {
    "Bound": "_core.aliases.Bound",
    "Bounds": "_core.aliases.Bounds",
    "Axes": "_core.aliases.Axes",
    "Ord": "_core.aliases.Ord",
    "Where": "weights.box.Where",
    "Projection": "weights.projection.Projection",
    "Recorder": "monitoring.record_norms.Recorder",
    "SkipTransformation": "gradients.skipping.SkipTransformation",
    "BadStep": "monitoring.bad_steps.BadStep",
    "Violation": "weights.violations.Violation",
    "Cause": "explaining.causes.Cause",
}
# What functions return as a record. The comments of its fields say what they are.
RECORDS = ("BadStep", "Violation", "Cause", "Input")
# Modules whose functions have an entry of their own.
MODULES = ("functional", "flax", "equinox", "plots")
ERRORS = re.compile(r"^( +)TypeError, ValueError: ", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrite docstrings and signatures once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit every object of the package."""
        names = {str(name) for name in pkg.exports or ()}
        for module in MODULES:
            functions = pkg[module].functions
            names |= {f"{module}.{name}" for name in functions if name[0] != "_"}

        def link(match: re.Match[str]) -> str:
            name = match["name"]
            if name in names or name in WORDS:
                return f"[`{name}`][clipjax.{WORDS.get(name, name)}]"
            return f"`{name}`"

        def visit(item: Any) -> None:
            if item.is_alias:
                return
            if item.docstring:
                text = ROLE.sub(link, WORD.sub(link, item.docstring.value))
                text = PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
                text = ERRORS.sub(r"\1TypeError or ValueError: ", text)
                text = PROSE.sub(
                    lambda m: f"**{m['title']}:** {' '.join(m['text'].split())}\n\n",
                    text,
                )
                text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
                if item.name in RECORDS:
                    text += f"\n\n{fields_of(item)}"
                if not item.is_module and item.parent.is_module:
                    lines = f"#L{item.lineno}-L{item.endlineno}"
                    file = item.relative_package_filepath
                    text += f"\n\n[Source]({SOURCE}/{file}{lines})"
                item.docstring.value = text
            for member in item.members.values():
                visit(member)

        visit(pkg)


def fields_of(record: griffe.Class) -> str:
    """Return a list of the fields of a record, with the comments at and above each."""
    lines = record.filepath.read_text(encoding="utf-8").splitlines()
    fields = []
    for field in record.attributes.values():
        above, row = [], field.lineno - 2
        while lines[row].strip().startswith("#"):
            above.insert(0, lines[row])
            row -= 1
        beside = lines[field.lineno - 1].partition("#")[1:]
        comments = [each.strip(" #") for each in (*above, "".join(beside))]
        text = " ".join(each for each in comments if each and "noqa" not in each)
        fields.append(
            f"- `{field.name}`: {field.annotation}" + f"; {text}" * bool(text)
        )
    return "\n".join(fields)
