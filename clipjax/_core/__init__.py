"""What every bound is made of: norms, factors, rounding, and how trees of leaves are walked."""
