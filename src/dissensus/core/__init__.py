"""What everything else stands on: members, likelihoods, predictives, the posterior contract and its seam."""
