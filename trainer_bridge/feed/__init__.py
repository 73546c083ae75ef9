"""Transports from rollout to trainer, both ends of each in one file."""
