"""Rows of text or conversations to packed batches; all on the host."""
