"""What signatures say of their values."""

from typing import Any, TypeAlias

import jax

Tree: TypeAlias = Any  # a pytree of arrays
Scalar: TypeAlias = jax.Array  # of rank 0
Metrics: TypeAlias = dict[str, jax.Array]  # scalars by name
