"""Thresholds that follow the past: over some steps, every device remembers what one device would."""

from __future__ import annotations

import pytest

from tests.support.eight_devices import ADAPTIVE, check, members


@pytest.mark.parametrize(("way", "name"), members(ADAPTIVE, "sharded jit", "shard_map", "unchecked", "pmap"))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)
