"""What training costs, worked out from the config alone: arithmetic, memory, time."""
