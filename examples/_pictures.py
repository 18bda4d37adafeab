"""Save the picture of an example twice: for light pages, and for dark ones."""

from pathlib import Path

import matplotlib.pyplot as plt

# Visible on both grounds, and color-blind readers can tell them apart.
BLUE, ORANGE, GREEN, GREY = "#2a8cc9", "#d55e00", "#009e73", "#8a8a8a"
GROUNDS = {"default": ("", "white"), "dark_background": ("-dark", "#0d1117")}


def save(path, draw, *args, size=13):
    """Save the figure that `draw(*args)` returns, at `NAME.png` and `NAME-dark.png`.

    Text has `size` points, and the color that Matplotlib's style gives it.
    """
    path = Path(path)
    for style, (ending, ground) in GROUNDS.items():
        own = {"font.size": size, "axes.titlesize": size, "legend.frameon": False}
        own |= {"axes.facecolor": ground, "savefig.facecolor": ground}
        with plt.style.context([style, own]):
            figure = draw(*args)
            figure.savefig(path.with_name(path.stem + ending + path.suffix), dpi=200)
            plt.close(figure)
    print(f"picture: {path}")
