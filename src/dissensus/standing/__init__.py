"""What can stand on a posterior: calibrations, and promises about calibrated predictions. Data and arithmetic, no loaders."""

from dissensus.core.standing import Fitted

KINDS: dict[str, type[Fitted]] = {each.kind: each for each in ()}  # by the name that files have for it
