"""The building blocks of every bound: norms, factors, rounding, and traversing trees."""
