"""What a bound costs: the same train step with and without it, beside Optax, as ratios."""
