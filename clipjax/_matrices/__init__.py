"""Matrices: which leaves are some, how their singular values are bounded, and how that is proven."""
