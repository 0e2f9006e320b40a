"""How members run."""
