"""Old optimizer states in new chains."""
