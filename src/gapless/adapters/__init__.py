"""LoRA adapters: applied to a decoder from outside, PEFT's file format in and out, merging."""
