"""The memory of activations: what a forward keeps for its backward."""
