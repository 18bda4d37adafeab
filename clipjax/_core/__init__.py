"""The parts of every transformation; each module imports only those above it.

aliases: names in signatures.
leaves: a tree taken apart, and the patterns that match its paths.
bounds: arguments that are numbers; bounds, which are evaluated at each step.
norms: norms of leaves, trees and units, over all devices.
clip: the factor that brings a norm to a bound, its product with the leaf, and bounds of
    single elements.
states: metrics, and what a transformation remembers.
door: from `act` on leaves to an Optax transformation, and `with_metrics`.
"""
