"""Matrices: which leaves are matrices, and how bounds on their singular values are enforced and proven."""
