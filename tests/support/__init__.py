"""What several tests use: oracles, tolerances and trees of numbers."""
