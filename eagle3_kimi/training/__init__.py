"""Training the draft model: batches, losses, metrics, checkpoints, the trainer."""
