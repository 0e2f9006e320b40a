"""Tasks over widths: a grid of ensembles, its rows, its claims and its page."""
