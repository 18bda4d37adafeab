"""Mutants: in a file of the package, an old text that occurs once, a new one, and the
tests that should notice.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake."""

    file: str  # in clipjax/
    old: str
    new: str
    test: str  # in tests/: the file that should fail first


_CONTRACT = ("ends", "inside", "nonfinite", "derivatives", "axes", "states", "leaves")
BOUNDS, INSIDE, NONFINITE, DERIVATIVES, AXES, STATES, LEAVES = (
    f"contract/test_{name}.py" for name in _CONTRACT
)
DEVICES = "devices/test_shard_map.py"
SPECTRAL = "weights/test_spectral.py"
_MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "_core/clipping.py": [
        ("else 2.0**-20", "else 0.0", BOUNDS),
        ("else 2.0**-20", "else 2.0**-17", BOUNDS),
        ("(float(info.eps) / 2 if info.bits < 32 else 0)", "0.0", BOUNDS),
        ("    inside &= norm < jnp.inf\n", "", "core/test_clipping.py"),
        ("target + 0 * norm", "target", NONFINITE),
        (
            "quotient_or_1(norm <= bound, bound * (1 - margin(norm.dtype if dtype is "
            "None else dtype)), norm)",
            "jnp.where(norm <= bound, 1, quotient_or_1(norm <= bound, bound, norm)"
            " * (1 - margin(norm.dtype if dtype is None else dtype)))",
            "programs/test_size.py",
        ),
        (
            "jnp.where(inside, 1, target + 0 * norm) / jnp.where(inside, 1, norm)",
            "jnp.where(inside, 1, (target + 0 * norm) / norm)",
            DERIVATIVES,
        ),
        ("jnp.where(factor == 1, x, scaled)", "scaled", INSIDE),
        ("(wanted + 0 * wanted)", "wanted", "gradients/test_relative_update.py"),
        ("| (norm == 0) | (wanted == 0)", "| (norm == 0)", "weights/test_keep_norm.py"),
        ("(x.astype(real.dtype) * real)", "(x * real.astype(x.dtype))", BOUNDS),
        ("x.at[...].set(y) if x.weak_type else y", "y", INSIDE),
        (
            "metrics_of(most, smallest(factors), after)",
            "metrics_of(most, smallest(factors))",
            "core/test_clipping.py",
        ),
        ("factor_to(bound, norm, dtype) for", "factor_to(bound, norm) for", BOUNDS),
        (
            "dict.fromkeys(x.dtype for x in floats)",
            "{x.dtype for x in floats}",
            "programs/test_same.py",
        ),
        ("scale < 1}", "scale <= 1}", "core/test_transformation.py"),
        ("norm * scale if", "norm if", BOUNDS),
        ("norms.nan_unless(least > -jnp.inf, least)", "least", "core/test_clipping.py"),
        (
            "xp.where(beyond, (np.nextafter if known else _nextafter)(near, "
            "xp.asarray(toward, dtype)), near)",
            "near",
            BOUNDS,
        ),
        (
            '("low", low, x, leaf), x.dtype, np.inf)',
            '("low", low, x, leaf), x.dtype, -np.inf)',
            "core/test_bounds.py",
        ),
        (
            "jnp.where((low < x) & (x < high), x, jnp.clip(x, low, high))",
            "jnp.clip(x, low, high)",
            INSIDE,
        ),
    ],
    "_core/norms.py": [
        (
            "jnp.where(fine, x, 0 * jnp.where(fine, 0, jnp.inf))",
            "jnp.where(fine, x, jnp.nan)",
            "wrappers/test_transforms.py",
        ),
        (
            "np.float64 if dtype in (np.float64, np.complex128) else np.float32",
            "np.float32",
            "wrappers/test_transforms.py",
        ),
        ("part.astype(sum_dtype(x.dtype)) for part", "part for part", BOUNDS),
        ("(x.real, x.imag)", "(x.real,)", LEAVES),
        ("jnp.where(x < jnp.inf, x, jnp.inf)", "x", "core/test_clipping.py"),
        (
            "jnp.where(root > 0, jnp.where(root > 0, root, 1) ** (1 - ord) / ord, 0)",
            "root ** (1 - ord) / ord",
            DERIVATIVES,
        ),
        (
            ", keepdims=axes is not None, initial=empty)",
            ", keepdims=axes is not None)",
            LEAVES,
        ),
        ("jnp.where(any_nan > 0, jnp.inf, most)", "most", "core/test_clipping.py"),
        (
            "over_devices(lax.pmax if ord == jnp.inf else lax.psum, total)",
            "over_devices(lax.psum, total)",
            DEVICES,
        ),
        (
            "over_devices(lax.psum if ord < jnp.inf else lax.pmax, combine(each))",
            "over_devices(lax.psum, combine(each))",
            DEVICES,
        ),
        (
            "over_devices(lax.psum if ord < jnp.inf else lax.pmax, combine(each))",
            "combine(each)",
            DEVICES,
        ),
        ("    warn_if_local()\n    return _root", "    return _root", DEVICES),
    ],
    "_core/units.py": [
        ("if axes := norms.mesh_axes(leaf.value):", "if axes := ():", DEVICES),
        ("and rank < 2:", "and rank < 1:", AXES),
        ("if len(leaf.shape) > 2:", "if len(leaf.shape) > 3:", AXES),
        ("-rank <= axis < rank", "-rank <= axis <= rank", AXES),
        ("{axis % rank for axis in each}", "set(each)", "errors/test_errors.py"),
        (
            "if floats and not (asked or found)",
            "if not floats and not (asked or found)",
            AXES,
        ),
    ],
    "_core/bounds.py": [
        ("return _at_least(as_float(value), least)", "return value", STATES),
        ("return _at_least(bound, least)", "return bound", "core/test_bounds.py"),
        ("(value >= least).all()", "(value >= least).any()", STATES),
    ],
    "_core/transformation.py": [
        ('(~jnp.isfinite(metrics["norm"]))', 'jnp.isnan(metrics["norm"])', NONFINITE),
        ("optax.safe_increment(state.step)", "state.step", STATES),
        (
            "jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)",
            "counter + more",
            "core/test_transformation.py",
        ),
        (
            "more.dtype.itemsize < 4",
            "more.dtype == bool",
            "core/test_transformation.py",
        ),
    ],
    "_core/trees.py": [
        (
            'pattern if whole else f"*/{pattern}"',
            "f\"/{pattern.lstrip('/')}\"",
            "composition/test_matching.py",
        ),
        (
            "sorted(found, key=place.__getitem__)",
            "sorted(found, key=place.__getitem__, reverse=True)",
            AXES,
        ),
        (
            "zip(first, found, strict=True) if not _is_absent(node)]",
            "zip(first, found, strict=True)]",
            "composition/test_matching.py",
        ),
        (
            "[other if pattern is None else given",
            "[None if pattern is None else given",
            AXES,
        ),
    ],
    "_checks.py": [
        ("if not ord >= 1:", "if not ord >= 0:", "errors/test_errors.py"),
        (
            "float64) > np.asarray(high",
            "float64) >= np.asarray(high",
            "core/test_bounds.py",
        ),
        (
            "None if u is None else p, updates",
            "p, updates",
            "core/test_transformation.py",
        ),
        (
            "if np.shape(update.value) != np.shape(param.value):",
            "if False:",
            "core/test_transformation.py",
        ),
    ],
    "gradients/clips.py": [
        (
            "max(_entries_per_unit(of), 1) ** 0.5",
            "max(_entries_per_unit(of), 1)",
            BOUNDS,
        ),
        (
            "math.prod([*local, *map(lax.axis_size, "
            "norms.mesh_axes(each.leaf.value))])",
            "math.prod(local)",
            DEVICES,
        ),
        ("units.norms_of(found, order)", "units.norms_of(found)", BOUNDS),
    ],
    "gradients/groups.py": [
        (
            'smallest([each["scale"]',
            'norms.largest([each["scale"]',
            "gradients/test_groups.py",
        ),
    ],
    "gradients/relative.py": [
        ("jnp.maximum(eps, _LEAST)", "_LEAST", BOUNDS),
        ("[norm / size for", "[norm * size for", BOUNDS),
        ("in (0, 1, 2, 4)", "in (0, 1, 2, 3, 4)", "gradients/test_relative.py"),
    ],
    "gradients/tangent_cone.py": [
        ("~(product >= 0)", "~(product <= 0)", BOUNDS),
        (
            " * (1 - 4 * clipping.margin(weight.dtype))",
            "",
            "gradients/test_tangent_cone.py",
        ),
        (
            "limit, size, each.leaf), size.dtype)",
            "limit, size, each.leaf))",
            "gradients/test_tangent_cone.py",
        ),
    ],
    "gradients/history.py": [
        (
            "jnp.where(counts(norm), new.astype(old.dtype), old)",
            "new.astype(old.dtype)",
            NONFINITE,
        ),
        ("(norm > 0) & (norm < jnp.inf)", "norm < jnp.inf", "gradients/test_levels.py"),
        (
            "jnp.where(entered >= 2 * len(values) - 1, len(values), entered + 1)",
            "entered + 1",
            "gradients/test_levels.py",
        ),
    ],
    "gradients/zclip.py": [
        (
            "jnp.where(warming, 1 - rate, (1 - rate) ** 2)",
            "1 - rate",
            "gradients/test_zclip.py",
        ),
        (
            "anew = spikes >= _NO_SPIKES",
            "anew = spikes < 0",
            "gradients/test_levels.py",
        ),
        (
            "jnp.where(spike, 1, -_ORDINARY)",
            "jnp.where(spike, 1, 0)",
            "gradients/test_zclip.py",
        ),
        (
            "jnp.maximum(1 - decay, 1 /",
            "jnp.minimum(1 - decay, 1 /",
            "gradients/test_zclip.py",
        ),
        (
            "known = counts(norm) | (steps > 0)",
            "known = counts(norm)",
            "gradients/test_history.py",
        ),
    ],
    "gradients/quantiles.py": [
        ("(norm <= bound)", "(norm < bound)", "gradients/test_quantiles.py"),
        (
            "jnp.where(ring.entered > 0, bound, jnp.inf)",
            "bound",
            "gradients/test_history.py",
        ),
        (
            "enter(past, norm, counts(norm))",
            "enter(past, norm, norm == norm)",
            "gradients/test_history.py",
        ),
    ],
    "gradients/adagc.py": [
        ("jnp.where(entering > 0, new, gamma)", "new", "gradients/test_adagc.py"),
        ("(gamma.astype(n.dtype) for", "(gamma for", "gradients/test_adagc.py"),
        (
            "trees.leaves_of(_unboxed(params))",
            "trees.leaves_of(params)",
            "wrappers/test_wrappers.py",
        ),
    ],
    "gradients/nonfinite.py": [
        (
            "astype(np.uint8), dtype=np.float32)",
            "astype(np.uint8), dtype=np.int32)",
            "gradients/test_skipping.py",
        ),
    ],
    "gradients/skipping.py": [
        (
            "fine | (in_a_row >= most)",
            "fine | (in_a_row > most)",
            "gradients/test_skipping.py",
        ),
        (
            "-zeros if trees.is_float(zeros) else zeros",
            "zeros",
            "gradients/test_skipping.py",
        ),
        (
            "lax.select(taken, new, old if old.dtype == new.dtype else "
            "old.astype(new.dtype))",
            "new",
            NONFINITE,
        ),
        (
            "return lax.select(",
            "return new if jnp.issubdtype(new.dtype, jnp.integer) else lax.select(",
            "wrappers/test_skipped_optimizers.py",
        ),
        (
            "transformation.saturating_add(in_a_row, skipped)",
            "in_a_row + 1",
            "gradients/test_skipping.py",
        ),
    ],
    "gradients/spikes.py": [
        ("_STD_PER_MAD = 1.4826", "_STD_PER_MAD = 1.0", "gradients/test_skipping.py"),
        ("finite & (norm > 0)", "finite", "gradients/test_skipping.py"),
    ],
    "weights/norms.py": [
        (
            "jnp.minimum(low, high), jnp.minimum(rate, 1)",
            "low, jnp.minimum(rate, 1)",
            "weights/test_norms.py",
        ),
        ("low * (1 - 4 * small)", "low", "contract/test_idempotent.py"),
        (
            "((norm >= low * (1 - 4 * small)) | (norm == 0))",
            "(norm >= low * (1 - 4 * small))",
            DERIVATIVES,
        ),
        ("_FREE.get(key)", "0.0", "weights/test_limits.py"),
    ],
    "weights/singular_values.py": [
        ("jnp.where(changed, bound * (1 - rounding), bound)", "bound", SPECTRAL),
        (
            "finite &= (most < jnp.inf) & ~jnp.isnan(bound)",
            "finite &= most < jnp.inf",
            SPECTRAL,
        ),
        ("level / _RATIO,", "level / (4 * _RATIO),", SPECTRAL),
        ("jnp.where(_of_each(above, w), capped, w)", "capped", SPECTRAL),
        ("(1 + 1e-5) * entry", "entry / 2", SPECTRAL),
        ("jnp.maximum(most * most - 1, 1)", "jnp.ones_like(most)", SPECTRAL),
        ("axis=-1) >= 1", "axis=-1) >= 3", SPECTRAL),
        ("axis=-1) >= 1", "axis=-1) > 0", SPECTRAL),
        ("(1 - room / 8) ** 2 * one", "(1 + room) ** 2 * one", SPECTRAL),
        ("gram / (1 - room) ** 2 - one", "gram - one", SPECTRAL),
        (
            "2 / (2 * (total / 3) ** 1.5 + ends)",
            "2.2 / (2 * (total / 3) ** 1.5 + ends)",
            SPECTRAL,
        ),
        (
            "total + _product(_adjoint(rows), rows)",
            "_product(_adjoint(rows), rows)",
            SPECTRAL,
        ),
    ],
    "weights/spectral.py": [
        ("if any(sharding.spec):", "if False:", SPECTRAL),
    ],
    "weights/qk_clip.py": [
        ('"" in (name, layers[0])', "True", "weights/test_qk_clip.py"),
        (
            "jnp.arange(side.leaf.value.shape[-1]) < width",
            "jnp.arange(side.leaf.value.shape[-1]) <= width",
            "weights/test_qk_clip.py",
        ),
        (
            "of_rotary, of_values = factor, jnp.ones_like(of_key)",
            "of_rotary, of_values = of_query, of_key",
            "weights/test_qk_clip.py",
        ),
        (
            "if wide == narrow if rope == 0 else 0 < wide - rope <= narrow:",
            "if True:",
            "weights/test_qk_clip.py",
        ),
    ],
    "monitoring/record_norms.py": [
        (
            "tuple(range(1, leaf.value.ndim))",
            "tuple(range(2, leaf.value.ndim))",
            "monitoring/test_stacks.py",
        ),
    ],
    "weights/keep_norm.py": [
        ("unrounded=True", "unrounded=False", "weights/test_keep_norm.py"),
        (
            "norms.norm(before[each.place].value, each.axes)",
            "norm",
            "weights/test_keep_norm.py",
        ),
    ],
    "weights/projection.py": [
        (
            "rounded = lax.reduce_precision(total, info.nexp, info.nmant)",
            "rounded = total",
            "weights/test_projection.py",
        ),
        (
            "jnp.where(wanted == summed, update, step.astype(update.dtype))",
            "step.astype(update.dtype)",
            "weights/test_projection.py",
        ),
        (
            "float(info.smallest_normal), total, rounded)",
            "0, total, rounded)",
            "weights/test_projection.py",
        ),
    ],
    "backward.py": [
        (
            "clipping.rescale(jnp.asarray(tangents[0]), factor)",
            "jnp.asarray(tangents[0])",
            BOUNDS,
        ),
    ],
    "functional.py": [
        (
            "(lambda path, leaf: axes) if isinstance(axes, int | tuple) else axes",
            "axes",
            AXES,
        ),
    ],
    "composition.py": [
        ("before.append(zero_nonfinite())", "pass", NONFINITE),
        (
            '        transformation.check_state("bounded with accumulate=", '
            "optax.MultiStepsState, state)\n",
            "",
            "composition/test_bounded.py",
        ),
        (
            "optax.chain(zero_nonfinite(), tx)",
            "optax.chain(tx, zero_nonfinite())",
            NONFINITE,
        ),
        (
            "elif last is not None and not isinstance(link, Recorder):",
            "elif False:",
            "composition/test_chain.py",
        ),
    ],
    "monitoring/metrics.py": [
        (
            "if i else name) not in labels)",
            "if i else name))",
            "core/test_transformation.py",
        ),
        ("jnp.maximum(steps, 1)", "steps", "core/test_transformation.py"),
    ],
}

MUTANTS = [
    Mutant(file, *each) for file, mutants in _MUTANTS.items() for each in mutants
]
