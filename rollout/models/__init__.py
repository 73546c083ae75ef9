"""Decoders in Paddle and the reading of their checkpoints."""
