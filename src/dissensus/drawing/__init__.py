"""Figures: one function each, takes arrays, returns a figure of matplotlib, saves nothing."""
