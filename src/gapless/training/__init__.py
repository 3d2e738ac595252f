"""Training: the trainer, the optimizer step, checkpoints and logs."""
