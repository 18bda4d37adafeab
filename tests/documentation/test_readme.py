"""The README's Python runs as it is written, from top to bottom."""

import re

import clipjax
from tests.support import ROOT

README = (ROOT / "README.md").read_text()


def test_the_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    shown = clipjax.metrics(scope["state"])
    assert f"'clip_by_global_norm/norm': {float(shown['clip_by_global_norm/norm']):.6f}" in README
    assert f"'clip_by_global_norm/scale': {float(shown['clip_by_global_norm/scale']):.8f}" in README


def test_every_public_name_is_there():
    for name in set(clipjax.__all__) - {"SKIP", "Projection"}:
        assert name in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
