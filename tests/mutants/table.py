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
ERRORS = "errors/test_errors.py"
DEVICES = "devices/test_shard_map.py"
TAPS = "monitoring/test_taps.py"
SPECTRAL = "weights/test_spectral.py"
_MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "_core/clipping.py": [
        ("else 2.0**-20", "else 0.0", BOUNDS),
        ("else 2.0**-20", "else 2.0**-17", BOUNDS),
        ("(float(info.eps) / 2 if info.bits < 32 else 0)", "0.0", BOUNDS),
        ("    inside &= norm < jnp.inf\n", "", "core/test_clipping.py"),
        ("target + 0 * norm", "target", NONFINITE),
        (
            "return quotient_or_1(norm <= bound, target, norm)",
            "return jnp.where(norm <= bound, 1, quotient_or_1(norm <= bound, bound, "
            "norm) * (1 - margin(norm.dtype if dtype is None else dtype)))",
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
            "metrics_of(largest, smallest_scale(factors), after)",
            "metrics_of(largest, smallest_scale(factors))",
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
    ],
    "_core/entries.py": [
        (
            "return xp.where(beyond, following(near, xp.asarray(toward, dtype)), near)",
            "return near",
            BOUNDS,
        ),
        (
            "_inward(below, x.dtype, np.inf)",
            "_inward(below, x.dtype, -np.inf)",
            "core/test_bounds.py",
        ),
        (
            "jnp.where(inside, x, jnp.clip(x, low, high))",
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
            "jnp.where(root > 0, safe ** (1 - ord) / ord, 0)",
            "root ** (1 - ord) / ord",
            DERIVATIVES,
        ),
        (
            '"keepdims": axes is not None, "initial": empty}',
            '"keepdims": axes is not None}',
            LEAVES,
        ),
        (
            "jnp.where(jnp.max(flags, **options) > 0, jnp.inf, jnp.max(x, **options))",
            "jnp.max(x, **options)",
            "core/test_clipping.py",
        ),
        (
            "over_devices(lax.pmax if ord == jnp.inf else lax.psum, power)",
            "over_devices(lax.psum, power)",
            DEVICES,
        ),
        (
            "[over_devices(over, combine(each)) for each",
            "[over_devices(lax.psum, combine(each)) for each",
            DEVICES,
        ),
        (
            "[over_devices(over, combine(each)) for each",
            "[combine(each) for each",
            DEVICES,
        ),
    ],
    "_core/transformation.py": [
        ("        norms.warn_if_local()\n", "", DEVICES),
        (
            'bad = ~jnp.isfinite(metrics["norm"])',
            'bad = jnp.isnan(metrics["norm"])',
            NONFINITE,
        ),
        (
            'f"/{x}".endswith("/steps")',
            'x == "steps"',
            ERRORS,
        ),
    ],
    "_core/states.py": [
        (
            "jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)",
            "counter + more",
            "core/test_states.py",
        ),
        (
            "if not np.can_cast(x.dtype, np.int32):",
            "if x.dtype != bool:",
            "core/test_states.py",
        ),
        ('{"steps": np.int32(1)}', '{"steps": np.int32(0)}', STATES),
        ("is_short and can_be_split", "is_short", "core/test_states.py"),
        ("is_short and can_be_split", "can_be_split", "core/test_states.py"),
        ("row.shape[-1] == 1", "row.size == 1", "core/test_states.py"),
        (
            "metrics = lax.stop_gradient(metrics)",
            "pass",
            "gradients/test_history.py",
        ),
    ],
    "_core/units.py": [
        ("math.prod([*local, *devices])", "math.prod(local)", DEVICES),
        ("if axes := norms.mesh_axes(leaf.value):", "if axes := ():", DEVICES),
        ("and rank < 2:", "and rank < 1:", AXES),
        (
            "        raise unclear_error(path, leaf)\n    return",
            "        pass\n    return",
            AXES,
        ),
        ("-rank <= axis < rank", "-rank <= axis <= rank", ERRORS),
        ("[axis % rank for axis in axes]", "list(axes)", ERRORS),
        (
            "if full and (not asked or",
            "if not full and (not asked or",
            ERRORS,
        ),
        ("_UNMATCHED = Skip()", "_UNMATCHED = SKIP", "core/test_units.py"),
        ("(not asked or _UNMATCHED in rules)", "not asked", ERRORS),
        (
            "[leaf for leaf, _ in skipped if leaf.value.size]",
            "[leaf for leaf, _ in skipped]",
            "core/test_units.py",
        ),
        (
            'f"{name}[{pattern!r}]", auto=auto)',
            'f"{name}[{pattern!r}]")',
            "core/test_units.py",
        ),
    ],
    "_core/bounds.py": [
        ("return _at_least(as_float(value), least)", "return value", STATES),
        ("return _at_least(bound, least)", "return bound", "core/test_bounds.py"),
        ("(value >= least).all()", "(value >= least).any()", ERRORS),
    ],
    "_core/trees.py": [
        (
            'pattern if pattern.startswith("/") else f"*/{pattern}"',
            "f\"/{pattern.lstrip('/')}\"",
            "composition/test_matching.py",
        ),
        (
            "sorted(found, key=place.__getitem__)",
            "sorted(found, key=place.__getitem__, reverse=True)",
            AXES,
        ),
        (
            "for which, (_, node) in kept if not _is_absent(node)]",
            "for which, (_, node) in kept]",
            "composition/test_matching.py",
        ),
        (
            "[other if pattern is None else given",
            "[None if pattern is None else given",
            AXES,
        ),
        (
            "None if x is None else y",
            "y",
            "core/test_transformation.py",
        ),
        ("if shape != np.shape(other.value):", "if False:", ERRORS),
    ],
    "_checks.py": [
        ('"[1, inf]"', '"[0, inf]"', ERRORS),
        (
            "float64) > np.asarray(high",
            "float64) >= np.asarray(high",
            "core/test_bounds.py",
        ),
    ],
    "gradients/clips.py": [
        ("units.entries_of(each) ** 0.5 for", "units.entries_of(each) for", BOUNDS),
        ("units.norms_of(found, order)", "units.norms_of(found)", BOUNDS),
    ],
    "gradients/groups.py": [
        (
            'smallest_scale([each["scale"]',
            'norms.largest([each["scale"]',
            "gradients/test_groups.py",
        ),
    ],
    "gradients/relative.py": [
        ("jnp.maximum(eps, _LEAST)", "_LEAST", BOUNDS),
        (
            "norm / jnp.maximum(weight_norm, least)",
            "norm * jnp.maximum(weight_norm, least)",
            BOUNDS,
        ),
        ("in (0, 1, 2, 4)", "in (0, 1, 2, 3, 4)", ERRORS),
    ],
    "gradients/tangent_cone.py": [
        ("~(product >= 0)", "~(product <= 0)", BOUNDS),
        (
            "near = clipping.least_inside(bound, weight.dtype)",
            "near = bound",
            "gradients/test_tangent_cone.py",
        ),
        (
            "jnp.asarray(fitted, weight_norm.dtype)",
            "jnp.asarray(fitted)",
            "gradients/test_tangent_cone.py",
        ),
    ],
    "gradients/history.py": [
        (
            "jnp.where(is_counted(norm), new.astype(old.dtype), old)",
            "new.astype(old.dtype)",
            NONFINITE,
        ),
        ("(norm > 0) & (norm < jnp.inf)", "norm < jnp.inf", "gradients/test_levels.py"),
    ],
    "gradients/window.py": [
        (
            "jnp.where(entered >= 2 * size - 1, size, entered + 1)",
            "entered + 1",
            "gradients/test_levels.py",
        ),
        (
            "entered % size",
            "jnp.minimum(entered, size - 1)",
            "gradients/test_quantiles.py",
        ),
        ("jnp.where(enters, more, entered)", "more", "monitoring/test_bad_steps.py"),
        (
            "last = jnp.maximum(count, 1) - 1",
            "last = jnp.maximum(count, 1)",
            "gradients/test_quantiles.py",
        ),
        (
            "row = ascending.shape[-1] * rows",
            "row = 0 * rows",
            "gradients/test_skipping.py",
        ),
        (
            "jnp.where(places < jnp.expand_dims(count, -1), values, most)",
            "values",
            "wrappers/test_transforms.py",
        ),
        (
            "isinstance(window, jax.core.Tracer) and size != window",
            "isinstance(window, jax.core.Tracer) and size > window",
            ERRORS,
        ),
    ],
    "gradients/zclip.py": [
        (
            "jnp.where(warming, 1 - rate, (1 - rate) ** 2)",
            "1 - rate",
            "gradients/test_zclip.py",
        ),
        (
            "anew = spikes >= _NEW_LEVEL_COUNT",
            "anew = spikes < 0",
            "gradients/test_levels.py",
        ),
        (
            "jnp.where(spike, 1, -_TAKEN_AWAY)",
            "jnp.where(spike, 1, 0)",
            "gradients/test_zclip.py",
        ),
        (
            "jnp.maximum(1 - decay, plain)",
            "jnp.minimum(1 - decay, plain)",
            "gradients/test_zclip.py",
        ),
        (
            "known = counted | (memory.steps > 0)",
            "known = counted",
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
            "enter(past, norm, is_counted(norm))",
            "enter(past, norm, norm == norm)",
            "gradients/test_history.py",
        ),
    ],
    "gradients/adagc.py": [
        ("jnp.where(entering > 0, new, gamma)", "new", "gradients/test_adagc.py"),
        (
            "gamma.astype(n.dtype) for n, gamma in pairs",
            "gamma for n, gamma in pairs",
            "gradients/test_adagc.py",
        ),
        (
            "trees.leaves_of(_unboxed(params))",
            "trees.leaves_of(params)",
            "wrappers/test_wrappers.py",
        ),
    ],
    "gradients/nonfinite.py": [
        (
            "jnp.sum(bad, dtype=np.float32)",
            "jnp.sum(bad, dtype=np.int32)",
            "gradients/test_skipping.py",
        ),
    ],
    "gradients/skipping.py": [
        (
            "fine | (memory.in_a_row >= most)",
            "fine | (memory.in_a_row > most)",
            "gradients/test_skipping.py",
        ),
        (
            "-zeros if trees.is_float(zeros) else zeros",
            "zeros",
            "gradients/test_skipping.py",
        ),
        ("return lax.select(skipped, same, new)", "return new", NONFINITE),
        (
            "return lax.select(",
            "return new if jnp.issubdtype(new.dtype, jnp.integer) else lax.select(",
            "wrappers/test_skipped_optimizers.py",
        ),
        (
            "states.saturating_add(memory.in_a_row, one)",
            "memory.in_a_row + 1",
            "gradients/test_skipping.py",
        ),
        ("        norms.warn_if_local()\n", "", DEVICES),
    ],
    "gradients/spikes.py": [
        ("_STD_PER_MAD = 1.4826", "_STD_PER_MAD = 1.0", "gradients/test_skipping.py"),
        (
            "jnp.stack([norm > 0, seen[1] != 0])",
            "seen[1] != 0",
            "gradients/test_skipping.py",
        ),
        (
            "warm = count >= enough",
            "warm = count > enough",
            "gradients/test_skipping.py",
        ),
        (
            "finite & (seen > thresholds) &",
            "(seen > thresholds) &",
            "gradients/test_skipping.py",
        ),
        (
            "finite.all() &",
            "finite &",
            "gradients/test_skipping.py",
        ),
        (
            "jnp.stack([norm > 0, seen[1] != 0])",
            "norm > 0",
            "gradients/test_skipping.py",
        ),
        (
            "jnp.minimum(thresholds, limits)",
            "thresholds",
            "gradients/test_skipping.py",
        ),
        ("jnp.maximum(std, floor)", "std", "gradients/test_skipping.py"),
    ],
    "weights/max_norm.py": [
        (
            "low = jnp.minimum(jnp.asarray(low, norm.dtype), high)",
            "low = jnp.asarray(low, norm.dtype)",
            "weights/test_norms.py",
        ),
        (
            "(norm >= clipping.least_inside(low, dtype))",
            "(norm >= low)",
            "contract/test_idempotent.py",
        ),
        (
            "(norm >= clipping.least_inside(low, dtype)) | (norm == 0)",
            "norm >= clipping.least_inside(low, dtype)",
            DERIVATIVES,
        ),
    ],
    "weights/limits.py": [
        (
            "now.get(pattern, self.other)",
            "now.get(pattern, 0.0)",
            "weights/test_limits.py",
        ),
        (
            "any(pattern is not None for",
            "all(pattern is not None for",
            "weights/test_limits.py",
        ),
        ("if i in places and of_low", "if of_low", "weights/test_limits.py"),
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
        ('"" in (name, layers[0])', "True", ERRORS),
        (
            "jnp.arange(side.leaf.value.shape[-1]) < wide - rope",
            "jnp.arange(side.leaf.value.shape[-1]) <= wide - rope",
            "weights/test_qk_clip.py",
        ),
        (
            "of_rotary = factor\n    of_values = jnp.ones_like(of_key)",
            "of_rotary, of_values = of_query, of_key",
            "weights/test_qk_clip.py",
        ),
        (
            "        if meet:\n",
            "        if True:\n",
            ERRORS,
        ),
    ],
    "monitoring/record_norms.py": [
        (
            "tuple(range(1, leaf.value.ndim))",
            "tuple(range(2, leaf.value.ndim))",
            "monitoring/test_stacks.py",
        ),
        (
            'spike | ~jnp.isfinite(norm) | ~jnp.isfinite(seen["loss"])',
            "spike | ~jnp.isfinite(norm)",
            "monitoring/test_bad_steps.py",
        ),
        (
            "jnp.sqrt(squares)",
            "squares",
            "monitoring/test_record_norms.py",
        ),
        (
            "    if order != list(range(len(names))):\n",
            "    if False:\n",
            "monitoring/test_bad_steps.py",
        ),
        (
            "states.NO_LOSS if loss is None else loss]",
            "jnp.nan if loss is None else loss]",
            "monitoring/test_bad_steps.py",
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
            "jnp.abs(total) < float(info.smallest_normal)",
            "jnp.abs(total) < 0",
            "weights/test_projection.py",
        ),
        (
            "weights is not None and path[-1:] not in names",
            "weights is not None",
            "weights/test_projection.py",
        ),
        (
            '(*self.needs, "step")',
            '("step", *self.needs)',
            "weights/test_projection.py",
        ),
        ("        norms.warn_if_local()\n        if self", "        if self", DEVICES),
        ("        norms.warn_if_local()\n        _check", "        _check", DEVICES),
    ],
    "backward.py": [
        (
            "clipping.rescale(jnp.asarray(tangents[0]), factor)",
            "jnp.asarray(tangents[0])",
            BOUNDS,
        ),
        (
            "norms.over_devices(lax.pmax, outside) > 0",
            "norms.over_devices(lax.pmin, outside) > 0",
            TAPS,
        ),
    ],
    "monitoring/taps.py": [
        ("finite & is_above, ~finite)", "is_above, ~finite)", TAPS),
        ("jnp.where(finite, norm, 0)]", "norm]", TAPS),
        (
            "lax.axis_index(name) == 0, sums",
            "lax.axis_index(name) >= 0, sums",
            TAPS,
        ),
    ],
    "functional.py": [
        (
            "(lambda path, leaf: axes) if isinstance(axes, int | tuple) else axes",
            "axes",
            AXES,
        ),
        ("if each.axes is None and keepdims:", "if False:", "core/test_units.py"),
        (
            "elif each.axes is not None and not keepdims:",
            "elif each.axes is not None:",
            "core/test_units.py",
        ),
        (
            '    norms.warn_if_local()\n    bound = bounds.as_constant("max_norm", '
            "max_norm)\n",
            '    bound = bounds.as_constant("max_norm", max_norm)\n',
            DEVICES,
        ),
    ],
    "composition.py": [
        (
            "before.append(zero_nonfinite())",
            "pass",
            NONFINITE,
        ),
        (
            "        states.check_state(name, optax.MultiStepsState, state)\n",
            "",
            ERRORS,
        ),
        (
            "optax.chain(zero_nonfinite(), tx)",
            "optax.chain(tx, zero_nonfinite())",
            NONFINITE,
        ),
        (
            "elif last is not None and not isinstance(link, Recorder):",
            "elif False:",
            ERRORS,
        ),
    ],
    "monitoring/metrics.py": [
        (
            "label = next(x for x in numbered if x not in labels)",
            "label = next(numbered)",
            "core/test_transformation.py",
        ),
        ("jnp.maximum(found[steps], 1)", "found[steps]", "core/test_transformation.py"),
    ],
    "monitoring/bad_steps.py": [
        (
            "count = min(entered, len(steps))",
            "count = len(steps)",
            "monitoring/test_bad_steps.py",
        ),
        (
            "math.nan if loss == states.NO_LOSS else loss",
            "loss",
            "monitoring/test_bad_steps.py",
        ),
        (
            "sorted(found, key=lambda each: each.step)",
            "list(found)",
            "monitoring/test_bad_steps.py",
        ),
    ],
    "monitoring/history.py": [
        ("prepend=0) != 0", "prepend=-1) != 0", "monitoring/test_series.py"),
        ("& ~both_nan", "", "monitoring/test_series.py"),
        (
            'if other.startswith(f"{label}/") and',
            "if other.startswith(label) and",
            "monitoring/test_series.py",
        ),
    ],
}

MUTANTS = [
    Mutant(file, *each) for file, mutants in _MUTANTS.items() for each in mutants
]
