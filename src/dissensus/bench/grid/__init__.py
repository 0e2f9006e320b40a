"""Tasks over a grid: every method at every value of a setting, drawn as quality against that setting."""
