"""Measures of how well embeddings tell classes apart, with intervals."""
