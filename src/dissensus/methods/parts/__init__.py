"""Base classes and helpers of the methods."""
