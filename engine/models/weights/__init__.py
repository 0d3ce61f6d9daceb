"""The weights of a model: its checkpoint, the parts of ranks, and random numbers in their place."""
