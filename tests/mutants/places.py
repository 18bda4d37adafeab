"""Mutants of where norms are taken: axes, layers, paths, mesh axes; and of what stands where in a chain."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "the axes of a kernel are those of its outputs",
        "_core/axes.py",
        "return tuple(range(rank - 1)) if rank >= 2 else SKIP",
        "return tuple(range(1, rank)) if rank >= 2 else SKIP",
        "tests/core/test_axes.py::test_fan_in_of_every_rank",
    ),
    Mutant(
        "the last matching pattern wins",
        "_core/paths.py",
        "return [matching[0] if matching",
        "return [matching[-1] if matching",
        "tests/core/test_axes.py::test_every_form_of_axes "
        "tests/core/test_paths.py::test_many_patterns_on_many_leaves_are_matched_in_order",
    ),
    Mutant(
        "a pattern that matches nothing is ignored",
        "_core/paths.py",
        "if not any(_may_reach(pattern, name) for name in left_out):",
        "if not names:",
        "tests/core/test_axes.py::test_a_pattern_that_matches_nothing_lists_the_paths",
    ),
    Mutant(
        "a projection of vectors alone is silent",
        "_core/axes.py",
        "if any(why for _, why in left):",
        "if not left:",
        "tests/core/test_axes_errors.py::test_what_bounds_nothing_says_so_in_init",
    ),
    Mutant(
        "the default takes a kernel of any rank for a convolution",
        "_core/axes.py",
        'FAN_IN_OF_MATRICES: Final = Default(fan_in_of_matrices, "fan_in")',
        'FAN_IN_OF_MATRICES: Final = Default(fan_in, "fan_in")',
        "tests/core/test_axes_errors.py::test_no_default_guesses_what_a_rank_means",
    ),
    Mutant(
        "the root mean square is that of the leaf",
        "_core/trees.py",
        "local = math.prod(shape if unit.reduced is None else (shape[a] for a in unit.reduced))",
        "local = math.prod(shape)",
        "tests/core/test_axes.py::test_rms_divides_by_the_entries_of_a_unit",
    ),
    Mutant(
        "the gradient of each unit is clipped as one leaf",
        "backward/layers.py",
        "return clip_units(gradient, lambda _: bound, axes, 2.0, specs, axis_name)",
        "return clip_units(gradient, lambda _: bound, None, 2.0, specs, axis_name)",
        "tests/backward/test_known_values.py::test_units",
    ),
    Mutant(
        "a convolution's units are those of a Dense layer",
        "_flax_layers.py",
        "return tuple(range(rank - 1))",
        "return (rank - 2,)",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "batch axes are reduced",
        "_flax_layers.py",
        "return tuple(range(len(batch), len(batch) + len(_as_tuple(layer.axis))))",
        "return tuple(range(len(_as_tuple(layer.axis))))",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer "
        "tests/flax/test_nnx_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "a transposed kernel is taken as any other",
        "_flax_layers.py",
        "out = rank - 2 if layer.transpose_kernel else rank - 1",
        "out = rank - 1",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer "
        "tests/flax/test_nnx_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "an einsum reduces what is in its output",
        "_flax_layers.py",
        "if label not in output)",
        "if label in output)",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer "
        "tests/flax/test_nnx_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "an embedding's units are its columns",
        "_flax_layers.py",
        "return tuple(range(1, rank))",
        "return tuple(range(rank - 1))",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer "
        "tests/flax/test_nnx_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "the axes of a stack of stacks come off in the wrong order",
        "_flax_linen.py",
        "for index in reversed(added):",
        "for index in added:",
        "tests/flax/test_linen_stacks.py::test_stacks_of_stacks_in_a_larger_model",
    ),
    Mutant(
        "bounded clips after the optimizer",
        "composition.py",
        'links.insert(0, _check_before("clip", clip))',
        'links.append(_check_before("clip", clip))',
        "tests/contract/test_nonfinite.py::test_bounded_has_three_modes "
        "tests/composition/test_bounded.py "
        "tests/composition/test_accumulation.py",
    ),
    Mutant(
        "a chain in a chain is not looked into",
        "composition.py",
        "flat = [(i, inner) for i, link in enumerate(links) for inner in links_of(link)]",
        "flat = [(i, link) for i, link in enumerate(links)]",
        "tests/composition/test_chain.py::test_a_misplaced_projection_is_an_error_that_says_where",
    ),
    Mutant(
        "the maximum over devices loses a NaN",
        "_core/mesh.py",
        "known = jnp.where(jnp.isnan(x), jnp.inf, x)",
        "known = jnp.where(jnp.isnan(x), -jnp.inf, x)",
        "tests/devices/test_lost_nan.py",
    ),
    Mutant(
        "the report of all devices loses a NaN",
        "_core/trees.py",
        "return list(jnp.where(unknown > 0, jnp.nan, most))",
        "return list(most)",
        "tests/devices/test_lost_nan.py",
    ),
    Mutant(
        "powers are not summed over devices",
        "_core/norms.py",
        "return root(lax.psum(power(norm), names))",
        "return root(lax.pmax(power(norm), names))",
        "tests/devices/test_shard_map.py::test_same_as_on_one_device",
    ),
    Mutant(
        "derivatives of norms are not summed over devices",
        "_core/norms.py",
        "return total, lax.psum(slope * tangents[0], names)",
        "return total, lax.pmean(slope * tangents[0], names)",
        "tests/devices/test_shard_map.py::test_a_gradient_through_a_clip_is_that_of_one_device",
    ),
    Mutant(
        "leaves that all devices have count once a device",
        "_core/mesh.py",
        "return [as_names(names) or varying(leaf) for names, leaf in each]",
        "return [tuple(jax.sharding.get_abstract_mesh().manual_axes) for _ in each]",
        "tests/devices/test_stages_and_experts.py::test_every_leaf_counts_once",
    ),
    Mutant(
        "what a mapping of axis names does not name is split as well",
        "_core/mesh.py",
        "return [() if pattern is None else axis_name[pattern] or () for pattern in found]",
        "return [next(iter(axis_name.values())) for _ in found]",
        "tests/devices/test_stages_and_experts.py::test_every_leaf_counts_once",
    ),
    Mutant(
        "units that other devices have are not in the metrics where types do not tell",
        "_core/mesh.py",
        "return names, tuple(name for name in everywhere if name not in names)",
        "return names, ()",
        "tests/devices/test_stages_and_experts.py::test_same_as_on_one_device",
    ),
    Mutant(
        "a share of several axes counts as one device",
        "_core/xla_cpu.py",
        "set(manual) == set(mesh.axis_names) if manual and mesh else False",
        "bool(manual)",
        "tests/devices/test_layouts.py::test_who_works_alone",
    ),
    Mutant(
        "shard_map is asked for axes that it leaves to the compiler",
        "_core/mesh.py",
        "return [tuple(name for name in entry if name not in compilers) for entry in names]",
        "return [tuple(name for name in entry) for entry in names]",
        "tests/devices/test_layouts.py::test_same_in_meshes_within_meshes",
    ),
    Mutant(
        "bad entries are counted on one device",
        "gradients/nonfinite.py",
        "lax.psum(found, names) if names else found",
        "lax.pmax(found, names) if names else found",
        "tests/devices/test_skipping_together.py::test_entries_that_are_zeroed_are_counted_on_all_devices",
    ),
    Mutant(
        "the radial part is that of one device",
        "gradients/tangent_cone.py",
        "product = lax.psum(product, unit.names)",
        "product = lax.pmin(product, unit.names)",
        "tests/devices/test_units_and_specs.py::test_same_as_on_one_device",
    ),
    Mutant(
        "the violation is that of one device",
        "_core/platforms.py",
        "[lax.pmax(x, tuple(over)) if over else x",
        "[lax.pmin(x, tuple(over)) if over else x",
        "tests/devices/test_units_and_specs.py::test_same_as_on_one_device",
    ),
    Mutant(
        "the least bound is that of one device",
        "_core/trees.py",
        "return -most_of([-value for value in values], over=over)[0]",
        "return most_of(values, over=over)[0]",
        "tests/devices/test_adaptive_thresholds.py::test_same_as_on_one_device",
    ),
    Mutant(
        "the state moves at a skipped step on many devices",
        "gradients/nonfinite.py",
        "jax.tree.map(lambda n, o: jnp.where(good, n, _typed_as(n, o)), new, old),",
        "new,",
        "tests/devices/test_skipping_together.py::test_a_skipped_step_leaves_the_state_as_it_was",
    ),
    Mutant(
        "a local convolution reduces its places",
        "_flax_layers.py",
        "return (rank - 2,)  #",
        "return tuple(range(rank - 1))  #",
        "tests/flax/test_linen_layers.py::test_the_units_of_a_layer",
    ),
    Mutant(
        "devices skip on their own",
        "gradients/spikes.py",
        "measure_tree(updates, 2.0, axis_name)",
        "measure_tree(updates, 2.0)",
        "tests/gradients/test_spikes_composed.py::test_devices_skip_together",
    ),
)
