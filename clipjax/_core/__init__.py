"""What every transformation is made of: each room needs only those above it.

aliases, messages: what signatures and the texts of errors share.
leaves: a tree taken apart, and the patterns that match its paths.
bounds: what users give as a bound, checked when known and evaluated at each step.
checks: what other arguments may be.
norms: norms of leaves and trees, over all devices.
units: which elements of a leaf share a norm.
clip: a norm and a bound become a factor, and the factor multiplies the leaf.
entries: limits of single elements.
states: metrics, and what a transformation remembers.
door: from `act` on leaves to an Optax transformation, and `with_metrics`.
"""
