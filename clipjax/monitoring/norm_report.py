"""A table of a log of norms, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clipjax.monitoring.replay import Suggestion

if TYPE_CHECKING:
    from clipjax.monitoring.norm_log import NormLog

_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def table(log: NormLog, suggestions: Mapping[str, Suggestion]) -> str:
    """Return the quantiles, and what each rule would have done."""
    counts = f"{len(log)} gradient norms" + (f", {log.name}" if log.name else "")
    counts += f", {log.nonfinite_count} of them not finite" if log.nonfinite_count else ", all finite"
    counts += f"; {log.dropped} before them are not kept" if log.dropped else ""
    quantiles = _columns(
        ["quantile", *("largest" if q == 1 else f"{q:.0%}" for q in _QUANTILES)],
        ["norm", *(f"{x:.3g}" for x in log.quantiles(_QUANTILES))],
    )
    rows = [["rule", "threshold at the end", "steps it clips", "as a constant"]]
    for name, (threshold, rate) in suggestions.items():
        known = threshold < np.inf  # some rules have no threshold before enough steps
        rows.append(
            [
                name,
                f"{threshold:.4g}" if known else "none",
                f"{rate:.1%}",
                f"{float(log.clip_rate(threshold)):.1%}" if known else "-",
            ]
        )
    return "\n".join([counts, "", *quantiles, "", *_columns(*rows)])


def _columns(*rows: list[str]) -> list[str]:
    """Align the first column left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in rows
    ]
