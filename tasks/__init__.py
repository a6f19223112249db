"""Data sets whose images belong to users, and the registry that finds them by name."""
