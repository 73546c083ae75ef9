"""The trainer's half: records become scores over the same kept sets, scores become ratios."""
