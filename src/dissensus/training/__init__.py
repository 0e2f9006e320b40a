"""What `fit` needs: its checks, the length of a run, its history, progress and checkpoints."""
