"""Scores over recorded kept sets."""
