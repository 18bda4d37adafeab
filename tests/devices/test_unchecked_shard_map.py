"""In a shard_map without `check_vma`, where `axis_name` says over what a norm is spread."""

from __future__ import annotations

import pytest

from tests.support.eight_devices import OF_LEAVES, OF_UNITS, check, members


@pytest.mark.parametrize(("way", "name"), members(OF_LEAVES | OF_UNITS, "unchecked"))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)
