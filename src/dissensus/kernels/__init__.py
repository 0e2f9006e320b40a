"""What only makes the same numbers faster: fused and lazy layers, caches of weights, Triton programs. Knows tensors only."""
