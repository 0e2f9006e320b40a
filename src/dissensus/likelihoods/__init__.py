"""Likelihoods of more than one class per input: a class for every token, and several labels."""
