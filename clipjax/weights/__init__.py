"""Projections of weights, called on parameters or as the last link of a chain."""
