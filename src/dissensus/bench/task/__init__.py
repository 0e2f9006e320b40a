"""Tasks: TOML files and what may stand in them."""
