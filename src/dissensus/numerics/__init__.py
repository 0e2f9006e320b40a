"""Pure functions on tensors, used by all other rooms; nothing here knows about posteriors."""
