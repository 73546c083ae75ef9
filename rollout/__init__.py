"""Generation: logits become kept sets, kept sets become records."""
