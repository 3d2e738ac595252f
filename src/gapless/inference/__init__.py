"""After training: loading what a run left, generating text with a KV cache, exporting to other tools."""
