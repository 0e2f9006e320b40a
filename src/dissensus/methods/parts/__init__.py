"""Parts: what methods are made of, base classes and helpers, used by two of them or more, or too long for one file."""
