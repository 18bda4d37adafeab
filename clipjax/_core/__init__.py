"""What every member is made of: norms, factors, units, paths, bounds and states."""
