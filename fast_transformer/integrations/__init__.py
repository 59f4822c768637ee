"""Fused attention for models of other libraries, each in a module of its own that imports the library."""
