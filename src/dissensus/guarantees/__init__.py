"""The verbs that fit what stands on a posterior: calibrations, conformal predictors, gates."""
