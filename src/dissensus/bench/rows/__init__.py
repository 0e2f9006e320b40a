"""Rows: the data sets of tasks, split, standardised and batched, and grids to look at functions on."""
