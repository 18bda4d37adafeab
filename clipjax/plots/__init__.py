"""Draw norms over the steps, layer by layer, bad steps, and norms of output units.

The functions need Matplotlib, which `import clipjax` does not load. Each one draws on
the axes `ax`, or on a new figure if `ax` is None, and returns the axes, so that
`plots.norms(history).figure.savefig("norms.png")` saves a picture.

If the figure has a layout, such as "constrained", the legend is beside the axes, or
below them if the axes are narrow. Color-blind readers can tell the colors of lines,
`plots.COLORS`, apart. Text and marks have the color of the labels of the axes, so that
a figure in Matplotlib's `dark_background` is as readable as a light one. A scale is
logarithmic, and its label says so, if the largest value is more than 20 times the
smallest. A cross at the top of the axes is a value that is not finite.
"""

from clipjax.plots._bars import bad_steps
from clipjax.plots._drawing import COLORS
from clipjax.plots._lines import group_norms, norms
from clipjax.plots._map import heat_map
from clipjax.plots._units import unit_norms

__all__ = ["COLORS", "bad_steps", "group_norms", "heat_map", "norms", "unit_norms"]
