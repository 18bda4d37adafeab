"""A mask for `optax.masked`, from path patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clipjax._core.aliases import Tree
from clipjax._core.leaves import check_patterns, first_matches, flatten


def matching(*patterns: str) -> Callable[[Any], Any]:
    """Make a mask from path patterns, for `optax.masked`.

    Use it to apply any transformation to a part of the parameters. A pattern is a glob
    for the whole path of a leaf, such as `"encoder/*"`, or for its last components,
    such as `"kernel"` or `"Dense_*/kernel"`. A pattern that begins with a slash has to
    match the whole path. `*` also matches slashes, so `"Dense*"` matches everything in
    `Dense_0`.

    Args:
      *patterns: one or several path patterns; a leaf is chosen if one of them matches
        it.

    Returns:
      A function from a tree to a tree of bools of the same structure.

    Raises:
      TypeError: a pattern is not a string.
      ValueError: when the function is called, a pattern matches no leaf.

    See Also:
      :func:`clip_by_group_norm` clips several groups; the
      `where` of :func:`box` takes the patterns themselves, and `axes` a mapping from
      patterns to axes.

    Example:
      >>> import clipjax, jax.numpy as jnp, optax
      >>> w = jnp.array([3.0, 4.0])
      >>> grads = {"encoder": {"w": w}, "head": {"w": w}}
      >>> clip = clipjax.clip_by_norm(1.0)
      >>> tx = optax.masked(clip, clipjax.matching("encoder/*"))
      >>> clipped, _ = tx.update(grads, tx.init(grads))
      >>> print(clipped["encoder"]["w"].round(3), clipped["head"]["w"])
      [0.6 0.8] [3. 4.]
    """
    check_patterns("patterns", patterns)

    def mask(tree: Tree) -> Any:
        leaves = flatten(tree)
        found = first_matches("patterns", patterns, leaves, in_order=False)
        return leaves.rebuild([pattern is not None for pattern in found])

    return mask
