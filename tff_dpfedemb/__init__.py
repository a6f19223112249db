"""Image embedding models trained with user-level differential privacy (DP-FedEmb)."""
