"""`dissensus theory`: computes and draws kernels and ensembles of wide networks."""
