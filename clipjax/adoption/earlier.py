"""States that earlier versions wrote, as states of today."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipjax._core.aliases import Memory
from clipjax._core.leaves import on_host
from clipjax._core.states import decoded, table


def of_today(node: Any) -> Any:
    """Return a state that clipjax 0.4.0 wrote as a state of today.

    A state of today is returned as it is. In 0.4.0 metrics shared arrays, whose keys
    named them.
    """
    keys = node.keys() if isinstance(node, Mapping) else set()
    if {"step", "norms", "text"} <= keys <= {"step", "names", "norms", "kept", "text"}:
        lines = decoded(on_host(node["text"])).split("\n")
        kept = table((tuple(lines),), on_host(node["norms"]))
        memory = _in_time(node.get("kept"))
        metrics: dict[str, Any] = {"record_norms": kept}
        return {"step": node["step"], "metrics": metrics, "memory": memory}
    is_packed = {"counts"} <= keys <= {"last", "counts", "memory"}
    counts = node["counts"] if is_packed else None
    # The keys of 0.4.0 end with names of metrics; a user's label may be "counts".
    names = list(map(str, counts)) if isinstance(counts, Mapping) else []
    if not any(re.search(r"/(.*, )?steps(,|$)", name) for name in names):
        return node
    found: dict[str, Any] = {}
    for rows in (node.get("last") or {}, node["counts"]):
        for key, x in rows.items():
            label, _, joined = key.partition("/")
            row = jnp.asarray(on_host(x))
            names = [joined] if row.shape[-1] == 1 else joined.split(", ")
            found |= {name: row[..., i] for i, name in enumerate(names)}
    step = found.pop("steps")
    metrics = {
        name.removesuffix("/steps"): x.astype(np.uint32)
        if name.endswith("/steps")
        else x
        for name, x in found.items()
    }
    memory = _in_time(node.get("memory"))
    return {"step": step, "metrics": {label: metrics}, "memory": memory}


def _in_time(memory: Memory) -> Any:
    """Return a memory of 0.4.0, with rings as windows in the order of time.

    In a ring, the next value takes the place `entered % size`, where the oldest is.
    """
    if not isinstance(memory, Mapping):
        return memory
    parts = {key: x if key == "inner" else _in_time(x) for key, x in memory.items()}
    if parts.keys() not in (
        {"values", "entered"},
        {"past", "entered", "steps", "rows"},
    ):
        return parts
    entered = jnp.asarray(on_host(parts.pop("entered")))
    size = np.shape(on_host(parts.get("values", parts.get("steps"))))[-1]
    places = (np.arange(size) + entered[..., None]) % size
    for key in parts.keys() - {"past"}:
        x = jnp.asarray(on_host(parts[key]))
        if x.ndim == places.ndim:
            parts[key] = jnp.take_along_axis(x, places, axis=-1)
        else:
            parts[key] = jnp.take_along_axis(x, places[..., None], axis=-2)
    return {**parts, "held": jnp.minimum(entered, size)}
