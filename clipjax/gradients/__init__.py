"""Clips of gradients: to fixed bounds, relative to the weights, and to bounds that follow past norms."""
