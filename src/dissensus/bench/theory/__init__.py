"""`dissensus theory`: kernels and ensembles of wide networks, computed, drawn and told."""
