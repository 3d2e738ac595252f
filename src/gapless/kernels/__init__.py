"""Operations of a training step, one file each: a plain PyTorch reference, and a Triton kernel beside it.

The references run on any device, compute in float32 inside, and define what the kernels must agree with.
"""
