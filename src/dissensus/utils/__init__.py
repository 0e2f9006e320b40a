"""Tools without mathematics of their own: checks of settings, trees of tensors, modes of torch, files, text, progress."""
