"""The parts of `dissensus.evaluate`: predictions of one draw, and the metrics of each kind of prediction."""
