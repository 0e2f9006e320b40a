"""The library inside other people's tools."""
