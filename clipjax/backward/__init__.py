"""Functions that change the gradient in the backward pass, at a place in a model."""
