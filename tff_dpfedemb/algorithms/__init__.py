"""Local training and the learning processes around it."""
