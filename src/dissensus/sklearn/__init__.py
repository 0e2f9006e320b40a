"""Tables in scikit-learn's manner: any method as a Classifier or a Regressor of DataFrames and arrays."""

from dissensus.sklearn.estimators import Classifier, Interval, Regressor, load

__all__ = ["Classifier", "Interval", "Regressor", "load"]
