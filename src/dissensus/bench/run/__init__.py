"""Runs: one method with one seed trained, predicted and measured, and all of a task together."""
