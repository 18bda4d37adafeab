"""One NaN on one device: every device learns of it, as a maximum or a minimum over devices may lose it.

`lax.pmax` and `lax.pmin` make no promise for NaN, and what they do depends on the order of the devices: so
it lies on the first, on one in the middle and on the last.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.eight_devices import IN_JIT, MEMBERS, NESTED, WAYS, Bad, left_out, members, same, steps_of

DEVICES_WITH_IT = (0, 3, 7)

ON_DEVICES = ("shard_map", "unchecked", "pmap", *NESTED, *IN_JIT)

# Bounds of entries: no entry shares the NaN, and `scale` and `norm_after` are those of the others or none.
OF_ENTRIES = ("value", "low and high value", "array of values", "box", "non_negative")


def bad_entries(way: str) -> list[Bad]:
    """One on each of some devices, in the gradient or in the weights."""
    entries = [("kernel", (2 * device, 5)) for device in DEVICES_WITH_IT]
    if WAYS[way].axis_name is None:  # else all leaves are split alike
        entries += [("columns", (5, device)) for device in DEVICES_WITH_IT]
    return [Bad(*entry, weights) for entry in entries for weights in (False, True)]


@pytest.mark.parametrize(("way", "name"), members(MEMBERS, *ON_DEVICES))
def test_a_nan_is_seen_as_on_one_device(way: str, name: str) -> None:
    but = left_out(way, name) + (("scale", "norm_after") if name in OF_ENTRIES else ())
    for bad in bad_entries(way):
        found, expected = (steps_of(where, name, bad)[-1] for where in (way, "one device"))
        same(found, expected, but)
        for key, leaf in expected[0].items():
            np.testing.assert_array_equal(np.isnan(found[0][key]), np.isnan(leaf), f"{bad}: {key}")
