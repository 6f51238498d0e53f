"""Judges whether a path is right: the float64 oracle, error bounds, selections."""
