"""Pure functions on tensors: what the rest is computed with, and nothing of posteriors."""
