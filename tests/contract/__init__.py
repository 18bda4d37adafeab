"""What holds for every member: one file a guarantee, one row of `members.py` a member."""
