"""Draw the norms of a run: one norm, each layer, a map of all layers, the bad steps.

The functions need Matplotlib, which `import clipjax` does not load. Each of them draws
on the axes `ax`, or on a new figure if `ax` is None, and returns the axes, so that
`plots.norms(history).figure.savefig("norms.png")` saves a picture. Text has the color
of the labels of the axes, so a picture is readable in Matplotlib's `dark_background`,
too. Orange always means that a norm is not finite.
"""

from clipjax.plots._lines import group_norms, norms
from clipjax.plots._maps import bad_steps, heat_map

__all__ = ["bad_steps", "group_norms", "heat_map", "norms"]
