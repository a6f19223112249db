"""Backbones, the private head, and the model that keeps the two apart."""
