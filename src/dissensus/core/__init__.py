"""The contract that everything else keeps: members, likelihoods, predictives, posteriors, and the seam to the engine."""
