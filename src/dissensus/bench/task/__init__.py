"""Tasks: TOML files and their allowed contents."""
