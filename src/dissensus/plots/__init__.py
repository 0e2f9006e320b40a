"""Figures: each function takes arrays and returns a matplotlib figure; nothing is saved."""
