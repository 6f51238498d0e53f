"""Functions for `tune_thresholds`.

`threshold_evidence` pairs the records of a kernel with the records of its baseline.
`threshold_check` checks that the automatic choice follows a threshold. `dense_crossover` derives
the lengths from which NSA is faster than dense attention. `yaml_text` edits the file of a device.
"""
