"""What is not finite, or a spike, on one device only: all devices count it, and all leave out the step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.eight_devices import CHOSEN, NESTED, SKIPPING, Bad, check, members, program, steps_of, tree

WAYS = ("shard_map", "unchecked", "pmap", *NESTED)


@pytest.mark.parametrize(("way", "name"), members(SKIPPING, "sharded jit", *WAYS))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.parametrize(("way", "name"), members(["skip_nonfinite", "bounded, skip"], *WAYS))
@pytest.mark.parametrize("row", [0, 6, 14])
def test_a_nan_on_one_device_skips_the_step_on_all(way: str, name: str, row: int) -> None:
    (updates, seen), (good, _) = (steps_of(way, name, bad)[0] for bad in (Bad("kernel", (row, 5)), None))
    for key, leaf in updates.items():
        assert (np.asarray(good[key]) != 0).all()
        assert (np.asarray(leaf) == 0).all(), f"some devices took the step with {key}"
    assert seen["skip_nonfinite/skipped"] == 1


@pytest.mark.parametrize(("way", "name"), members(["skip_nonfinite"], "shard_map", "unchecked"))
def test_a_skipped_step_leaves_the_state_as_it_was(way: str, name: str) -> None:
    bad = tree(0)
    bad["kernel"][6, 5] = np.nan
    (first, _), _, (third, _) = (
        (updates[name], seen[name])
        for updates, seen in program(way, name in CHOSEN[way]).steps([tree(0), bad, tree(0)], tree(1))
    )
    for key, leaf in third.items():  # the second step that is taken
        np.testing.assert_allclose(leaf, np.asarray(first[key]) / 2, rtol=1e-3)


@pytest.mark.parametrize(("way", "name"), members(["skip_spikes"], *WAYS))
def test_a_spike_on_one_device_skips_the_step_on_all(way: str, name: str) -> None:
    bad = Bad("kernel", (6, 5), value=1e9)
    (before, _), *_, (updates, seen) = steps_of(way, name, bad)
    for key, leaf in updates.items():
        assert (np.asarray(before[key]) != 0).all()
        assert (np.asarray(leaf) == 0).all(), f"some devices took the step with {key}"
    assert seen["skip_spikes/skipped"] == 1


@pytest.mark.parametrize(("way", "name"), members(["global"], *WAYS))
def test_a_nan_on_one_device_makes_the_clipped_tree_nan_on_all(way: str, name: str) -> None:
    updates, seen = steps_of(way, name, Bad("kernel", (6, 5)))[-1]
    assert all(np.isnan(leaf).all() for leaf in updates.values())
    assert seen["clip_by_global_norm/nonfinite_count"] == 1


@pytest.mark.parametrize(("way", "name"), members(["zero_nonfinite", "bounded, zero"], *WAYS))
def test_entries_that_are_zeroed_are_counted_on_all_devices(way: str, name: str) -> None:
    """Two on the first device, one on the next, one on the last."""
    rows, column = (0, 1, 2, 15), 5
    updates, seen = steps_of(way, name, Bad("kernel", (rows, column)))[-1]
    assert seen["zero_nonfinite/nonfinite_count"] == len(rows)
    kernel = np.asarray(updates["kernel"])
    assert (kernel[rows, column] == 0).all()
    assert np.count_nonzero(kernel) == kernel.size - len(rows)
