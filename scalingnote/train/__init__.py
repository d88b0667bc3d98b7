"""Stage I: both towers trained together, contrastively, on Ray Train."""
