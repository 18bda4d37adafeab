"""What the transformations measured: metrics, records of norms, and their pictures."""
