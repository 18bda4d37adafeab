"""Save the picture of an example twice: for light pages, and for dark ones."""

from pathlib import Path

import matplotlib.pyplot as plt

GROUNDS = {"default": ("", "white"), "dark_background": ("-dark", "#0d1117")}


def save(path, draw, *args):
    """Save the figure that `draw(*args)` returns, at `NAME.png` and `NAME-dark.png`.

    The colors of lines are those of `clipjax.plots.COLORS`, which are visible on both
    grounds. Text has the color that Matplotlib's style gives it.
    """
    path = Path(path)
    for style, (ending, ground) in GROUNDS.items():
        own = {"font.size": 13, "axes.titlesize": 14, "legend.fontsize": 11}
        own |= {"axes.facecolor": ground, "savefig.facecolor": ground}
        with plt.style.context([style, own]):
            figure = draw(*args)
            figure.savefig(path.with_name(path.stem + ending + path.suffix), dpi=200)
            plt.close(figure)
    print(f"picture: {path}")
