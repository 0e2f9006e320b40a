"""Changes to a user's network that let many members share one set of weights."""
