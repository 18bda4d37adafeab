"""What every member is made of: each room needs only those above it.

aliases, messages: what signatures and the texts of errors share.
bounds: the numbers that users give, checked when known and evaluated at each step.
trees: leaves with their paths, and the patterns that match these.
norms: norms of leaves and trees, over all devices.
units: which entries of a leaf share a norm.
clipping: a norm and a bound become a factor, and the factor meets the entries.
entries: limits of single entries.
states: metrics in few arrays, and what a recorder remembers.
transformation: `with_metrics`.
"""
