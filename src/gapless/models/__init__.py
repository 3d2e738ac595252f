"""Decoder-only transformers on packed streams: one decoder, one small file per family, Hugging Face weights."""
