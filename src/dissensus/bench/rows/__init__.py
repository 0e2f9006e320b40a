"""The rows of tasks: data sets that are split, standardised and batched, and grids on which functions are drawn."""
