"""Functions for `tune_thresholds`.

`threshold_evidence` pairs the records of a kernel
with those of its baseline; `threshold_check` checks that the automatic choice follows a
threshold.
"""
