"""Runs: train, predict and measure one method with one seed, or all methods and seeds of a task."""
