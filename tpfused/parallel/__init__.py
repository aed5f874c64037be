"""Existing models made tensor-parallel: `parallelize`, and the same styles for other libraries' entry points."""
