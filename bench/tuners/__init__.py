"""What `tune_thresholds` pairs and checks.

`threshold_evidence` pairs the records of a kernel
with those of its baseline; `threshold_check` asks whether choice obeys a threshold.
"""
