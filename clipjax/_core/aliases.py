"""The names that signatures use for the values of arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, SupportsIndex, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike


class Skip:
    """The type of :data:`clipjax.SKIP`, which marks leaves that are not changed."""

    def __repr__(self) -> str:
        return "clipjax.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # copies and pickles are the same object


SKIP: Final = Skip()
"""The value of `axes`, or of `flatten`, for a leaf that is not changed.

Use it in a mapping, as in `axes={"head/*": clipjax.SKIP, "*": "auto"}`.
"""

Tree: TypeAlias = Any  # a pytree of arrays
Scalar: TypeAlias = jax.Array  # of rank 0
Step: TypeAlias = Any  # an int32 scalar: how many updates there were; or None
State: TypeAlias = Any  # of a transformation, or None
Memory: TypeAlias = Any  # what a transformation itself remembers, of its own type
DType: TypeAlias = DTypeLike | None
Metrics: TypeAlias = dict[str, jax.Array]  # scalars by name
Path: TypeAlias = tuple[Any, ...]  # the keys that JAX gives to a leaf

Number: TypeAlias = float | np.number[Any] | jax.Array
# A threshold or a bound: a number, an array, or a schedule from the step to these.
# Bounds of weights may also be mappings from path patterns to these.
# Optax has a name for schedules, too, but no types that others see.
Bound: TypeAlias = ArrayLike | Callable[[Any], ArrayLike]
Bounds: TypeAlias = Bound | Mapping[str, Bound]
Ord: TypeAlias = float | np.number[Any] | None

# The axes that are reduced: ints, a rule (path, leaf) -> ints, or a mapping from path
# patterns to these.
Rule: TypeAlias = Callable[[Any, Any], Any]
Axes: TypeAlias = (
    SupportsIndex | Sequence[SupportsIndex] | Rule | Skip | Mapping[str, Any] | None
)
AutoAxes: TypeAlias = Axes | Literal["auto"]

# The axes to reduce in one leaf. Reduced axes are kept with size 1; None reduces all
# axes and keeps none.
Reduced: TypeAlias = tuple[int, ...] | None
