"""Which operation, in which line, made a result NaN or infinite."""
