"""The interfaces that all other rooms use: members, likelihoods, predictives, posteriors, and the seam to the engine."""
