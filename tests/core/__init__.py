"""What the core promises its members, where no member shows it alone."""
