"""Looking at norms and metrics."""
