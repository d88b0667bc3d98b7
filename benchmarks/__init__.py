"""What this system costs and how good it is: one file per figure, each prints a table and writes JSON."""
