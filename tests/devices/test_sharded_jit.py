"""Under jit, on arrays spread over eight devices: the numbers of one device, and the same sharding."""

from __future__ import annotations

import pytest

from tests.support.eight_devices import (
    BY_TYPE,
    MEMBERS,
    OF_LEAVES,
    OF_UNITS,
    check,
    members,
    placed,
    steps_of,
    tree,
)


@pytest.mark.parametrize(("way", "name"), members(OF_LEAVES | OF_UNITS | BY_TYPE, "sharded jit"))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.parametrize(("way", "name"), members(MEMBERS, "sharded jit"))
def test_every_leaf_keeps_its_sharding(way: str, name: str) -> None:
    updates, _ = steps_of(way, name)[0]
    for key, leaf in placed(tree()).items():
        found = updates[key].sharding
        assert found.is_equivalent_to(leaf.sharding, leaf.ndim), f"{key}: {found}"
