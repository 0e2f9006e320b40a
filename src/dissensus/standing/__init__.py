"""What can stand on a posterior: calibrations, and promises about calibrated predictions. Data and arithmetic, no loaders."""

from dissensus.core.standing import Fitted
from dissensus.standing.conformal import Conformal
from dissensus.standing.gate import Gate

KINDS: dict[str, type[Fitted]] = {each.kind: each for each in (Conformal, Gate)}  # by the name that files have for it
