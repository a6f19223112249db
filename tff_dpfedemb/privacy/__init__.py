"""What the software promises about privacy, and everything that is derived from the promise."""
