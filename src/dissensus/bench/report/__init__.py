"""Turns evaluations into numbers with intervals, sentences, figures and pages; does not import bench."""
