"""Mutants: in a file of the package, an old text that occurs once, a new one, and the tests that should notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake."""

    file: str  # in clipjax/
    old: str
    new: str
    test: str  # in tests/: the file that should fail first


_CONTRACT = ("bounds", "inside", "nonfinite", "derivatives", "axes", "states", "leaves")
BOUNDS, INSIDE, NONFINITE, DERIVATIVES, AXES, STATES, LEAVES = (f"contract/test_{name}.py" for name in _CONTRACT)
DEVICES = "devices/test_shard_map.py"
_MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "_core/rescale.py": [
        ("else 2.0**-20)", "else 0.0)", BOUNDS),
        ("else 2.0**-20)", "else 2.0**-17)", BOUNDS),
        ("(float(info.eps) / 2 if info.bits < 32 else 0)", "0.0", BOUNDS),
        ("inside = (norm <= bound) & (norm < jnp.inf)", "inside = norm <= bound", "core/test_rescale.py"),
        ("outside = nan_unless(norm < jnp.inf, norm)", "outside = norm", NONFINITE),
        ("_quotient(inside, bound * (1 - margin(dtype)), norm)",
         "jnp.where(inside, 1, _quotient(inside, bound, norm) * (1 - margin(dtype)))", "programs/test_size.py"),
        ("jnp.where(inside, 1, target) / jnp.where(inside, 1, outside)",
         "jnp.where(inside, 1, target / outside)", DERIVATIVES),
        ("jnp.minimum(low, high), jnp.minimum(rate, 1)", "low, jnp.minimum(rate, 1)", "core/test_rescale.py"),
        ("low * (1 - 4 * small)", "low", "contract/test_idempotent.py"),
        ("((norm >= low * (1 - 4 * small)) | (norm == 0))", "(norm >= low * (1 - 4 * small))", DERIVATIVES),
        ("jnp.where(factor == 1, x, scaled)", "scaled", INSIDE),
        ("(x.astype(real.dtype) * real)", "(x * real.astype(x.dtype))", BOUNDS),
        ("x.at[...].set(y) if x.weak_type else y", "y", INSIDE),
    ],
    "_core/norms.py": [
        ("jnp.where(fine, x, 0 * jnp.where(fine, 0, jnp.inf))", "jnp.where(fine, x, jnp.nan)",
         "wrappers/test_transforms.py"),
        ("np.float64 if dtype in (np.float64, np.complex128) else np.float32", "np.float32",
         "wrappers/test_transforms.py"),
        ("jnp.square(part.astype(wide(x.dtype)))", "jnp.square(part).astype(wide(x.dtype))", BOUNDS),
        ("(x.real, x.imag)", "(x.real,)", LEAVES),
        ("jnp.where(x < jnp.inf, x, jnp.inf)", "x", "core/test_rescale.py"),
        ("jnp.where(root > 0, jnp.where(root > 0, root, 1) ** (1 - ord) / ord, 0)", "root ** (1 - ord) / ord",
         DERIVATIVES),
        (", axis=axes, keepdims=keep, initial=0)", ", axis=axes, keepdims=keep)", LEAVES),
        ("over_devices(lax.pmax if ord == jnp.inf else lax.psum, total)", "over_devices(lax.psum, total)", DEVICES),
        ("_over_leaves(_most, lax.pmax, powers)", "_over_leaves(_most, lax.psum, powers)", DEVICES),
        ("totals = [over_devices(over, combine(each)) for each in local.values()]",
         "totals = [combine(each) for each in local.values()]", DEVICES),
        ("    warn_if_local()\n    powers", "    powers", DEVICES),
        ("if not ord >= 1:", "if not ord >= 0:", "errors/test_errors.py"),
    ],
    "_core/units.py": [
        ("metrics_of(norm, smallest(factors), after)", "metrics_of(norm, smallest(factors))",
         "core/test_rescale.py"),
        ("factor_to(bound, norm, dtype) for", "factor_to(bound, norm) for", BOUNDS),
        ("dict.fromkeys(x.dtype for x in floats)", "{x.dtype for x in floats}", "programs/test_same.py"),
        ("return local * math.prod(lax.axis_size(name) for name in mesh_axes(units.leaf.value))", "return local",
         DEVICES),
        ("if reduced is not None and mesh_axes(leaf.value):", "if False:", DEVICES),
        ("scale < 1}", "scale <= 1}", "core/test_states.py"),
        ("norm * scale if", "norm if", BOUNDS),
        ("nan_unless(least > -jnp.inf, least)", "least", "core/test_rescale.py"),
        ("norms / size_of(units)", "norms * size_of(units)", BOUNDS),
    ],
    "_core/axes.py": [
        ("and rank < 2:", "and rank < 1:", AXES),
        ("if rank > 2:", "if rank > 3:", AXES),
        ("-rank <= axis < rank", "-rank <= axis <= rank", AXES),
        ("{axis % rank for axis in each}", "set(each)", "core/test_axes.py"),
        ("if p is not None else SKIP", "if p is not None else None", AXES),
        ("(lambda path, leaf: axes) if isinstance(axes, int | tuple) else axes", "axes", AXES),
        ("if floats and all(", "if not floats and all(", AXES),
    ],
    "_core/bounds.py": [
        ("return jnp.maximum(value, least)", "return value", STATES),
        ("return jnp.maximum(bound, least)", "bound", "core/test_limits.py"),
        ("(value < least).any()", "(value < least).all()", STATES),
        ("float64) > np.asarray(high", "float64) >= np.asarray(high", "core/test_limits.py"),
    ],
    "_core/entries.py": [
        ("xp.where(beyond, xp.nextafter(near, xp.asarray(toward, dtype)), near)", "near", BOUNDS),
        ('("low", low, x, leaf), x.dtype, np.inf)', '("low", low, x, leaf), x.dtype, -np.inf)', "core/test_limits.py"),
        ("jnp.where((bottom < x) & (x < top), x, jnp.clip(x, bottom, top))", "jnp.clip(x, bottom, top)", INSIDE),
    ],
    "_core/transformation.py": [
        ('(~jnp.isfinite(metrics["norm"]))', 'jnp.isnan(metrics["norm"])', NONFINITE),
        ("optax.safe_increment(state.step)", "state.step", STATES),
        ("jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)", "counter + more",
         "core/test_states.py"),
        ("None if u is None else p, updates", "p, updates", "core/test_states.py"),
        ("if np.shape(update.value) != np.shape(param.value):", "if False:", "core/test_states.py"),
    ],
    "_core/paths.py": [
        ('pattern if whole else f"*/{pattern}"', 'f"/{pattern.lstrip(\'/\')}"', AXES),
        ("sorted(found, key=place.__getitem__)", "sorted(found, key=place.__getitem__, reverse=True)", AXES),
        ("zip(first, found, strict=True) if not _is_absent(node)]", "zip(first, found, strict=True)]", LEAVES),
    ],
    "gradients/clips.py": [
        ("max(_core.entries_per_unit(units), 1) ** 0.5", "max(_core.entries_per_unit(units), 1)", BOUNDS),
        ("clip_units(updates, axes, bound(step), order)", "clip_units(updates, axes, bound(step))", BOUNDS),
    ],
    "gradients/groups.py": [
        ('smallest([each["scale"]', 'largest([each["scale"]', "core/test_rescale.py"),
    ],
    "gradients/relative.py": [
        ('jnp.maximum(size, _core.broadcastable("eps", floor, size, units.leaf))', "size", BOUNDS),
    ],
    "gradients/tangent_cone.py": [
        ("~(product >= 0)", "~(product <= 0)", BOUNDS),
        (" * (1 - 4 * _core.margin(weight.dtype))", "", "core/test_link.py"),
    ],
    "gradients/history.py": [
        ("jnp.where(jnp.isfinite(norm), new.astype(old.dtype), old)", "new.astype(old.dtype)", NONFINITE),
    ],
    "gradients/zclip.py": [
        ("rate * (1 - rate) ** 2", "rate * (1 - rate)", "gradients/test_zclip.py"),
        ("jnp.maximum(1 - decay, 1 /", "jnp.minimum(1 - decay, 1 /", "gradients/test_zclip.py"),
    ],
    "gradients/quantiles.py": [
        ("(norm <= bound)", "(norm < bound)", "gradients/test_quantiles.py"),
    ],
    "gradients/adagc.py": [
        ("jnp.where(entering > 0, new, gamma)", "new", "gradients/test_adagc.py"),
        ("_core.leaves_of(_core.unboxed(params))", "_core.leaves_of(params)", "wrappers/test_wrappers.py"),
    ],
    "gradients/nonfinite.py": [
        ("jnp.sum(~finite, dtype=np.float32)", "jnp.sum(~finite, dtype=np.int32)", "composition/test_skipping.py"),
    ],
    "gradients/skipping.py": [
        ("fine | (in_a_row >= most)", "fine | (in_a_row > most)", "composition/test_skipping.py"),
        ("in_a_row + (~taken).astype(np.int32)", "in_a_row + 1", "core/test_states.py"),
    ],
    "gradients/spikes.py": [
        ("_STD_PER_MAD = 1.4826", "_STD_PER_MAD = 1.0", "composition/test_skipping.py"),
        ("finite & (norm > 0)", "finite", "core/test_states.py"),
    ],
    "weights/projection.py": [
        ("rounded = lax.reduce_precision(total, info.nexp, info.nmant)", "rounded = total", "core/test_link.py"),
        ("jnp.where(wanted == summed, update, wanted - param)", "wanted - param", "core/test_link.py"),
        ("float(info.smallest_normal), total, rounded)", "0, total, rounded)", "core/test_link.py"),
    ],
    "backward.py": [
        ("_core.rescale(jnp.asarray(tangents[0]), factor)", "jnp.asarray(tangents[0])", BOUNDS),
    ],
    "composition.py": [
        ("before.append(zero_nonfinite())", "pass", NONFINITE),
        ("optax.chain(zero_nonfinite(), tx)", "optax.chain(tx, zero_nonfinite())", NONFINITE),
        ("elif last is not None and not isinstance(link, Recorder):", "elif False:", "composition/test_chain.py"),
    ],
    "monitoring/metrics.py": [
        ("if x not in labels)", "if x)", "core/test_states.py"),
        ("jnp.maximum(steps, 1)", "steps", "core/test_states.py"),
    ],
}  # fmt: skip

MUTANTS = [Mutant(file, *each) for file, mutants in _MUTANTS.items() for each in mutants]
