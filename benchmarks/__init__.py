"""What a bound costs: train steps with clipjax beside the same steps with Optax or by the formula."""
