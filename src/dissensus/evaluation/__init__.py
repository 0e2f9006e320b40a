"""The parts of `dissensus.evaluate`: what is gathered from one draw, and the numbers of each kind of prediction."""
