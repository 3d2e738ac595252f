"""Operations of the decoder, one file each: a plain PyTorch reference, later a kernel beside it.

The references run on any device, compute in float32 inside, and define what the fast kernels must agree with.
"""
