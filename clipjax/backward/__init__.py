"""Identity layers that change the gradient in the backward pass."""
