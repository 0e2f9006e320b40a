"""Tasks over widths: a grid of ensembles, its rows, what they say, and their page."""
