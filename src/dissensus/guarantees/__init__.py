"""The verbs that fit calibrations, conformal predictors and gates to a posterior's predictions on held-out rows."""
