"""scikit-learn estimators for tables: any method as a Classifier or a Regressor on DataFrames and arrays."""

from dissensus.sklearn.estimators import Classifier, Interval, Regressor, load

__all__ = ["Classifier", "Interval", "Regressor", "load"]
