"""What holds for every member: a file for a guarantee, a row for a member."""
