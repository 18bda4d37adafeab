"""What the transformations measured: metrics, and records of norms."""
