"""The parts of every transformation; each module imports only those above it.

aliases, messages: names in signatures, and what the texts of errors share.
leaves: a tree taken apart, and the patterns that match its paths.
bounds: thresholds and bounds, checked when they are known and evaluated at each step.
checks: the values that other arguments may have.
norms: norms of leaves and trees, over all devices.
units: the elements of a leaf that share a norm.
clip: the factor that brings a norm to a threshold, and its product with the leaf.
entries: thresholds and bounds of single elements.
states: metrics, and what a transformation remembers.
door: from `act` on leaves to an Optax transformation, and `with_metrics`.
"""
