"""What is built and installed, and what is said about the project in files that tools read."""
