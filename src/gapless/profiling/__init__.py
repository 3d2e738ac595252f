"""`gapless profile`: what the GPU and the host do in a training step, and why the GPU waits."""
