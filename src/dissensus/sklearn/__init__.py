"""scikit-learn estimators for tables: any method as a Classifier or a Regressor on DataFrames and arrays."""

from dissensus.utils.extras import require_extra

require_extra("sklearn")
from dissensus.sklearn.estimators import Classifier, Interval, Regressor, load  # noqa: E402

__all__ = ["Classifier", "Interval", "Regressor", "load"]
