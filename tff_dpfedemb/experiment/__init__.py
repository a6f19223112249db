"""The training loop as program logic: run folder, checkpoints, metrics, progress, export."""
