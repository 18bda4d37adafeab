"""What a bound costs: steps with clipjax beside those with Optax or by the formula."""
