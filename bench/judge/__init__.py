"""Judges whether the results of an implementation are right. The package has the float64 oracle,
the error bounds, and the rules for selections of blocks."""
