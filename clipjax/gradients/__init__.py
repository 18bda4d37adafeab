"""Transformations of gradients."""
