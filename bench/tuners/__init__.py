"""What `tune_tiles` and `tune_thresholds` search, pair and check.

`tile_search` tries the tiles of a kernel. `threshold_evidence` pairs the records of a kernel
with those of what it is compared with; `threshold_check` asks whether choice obeys a threshold.
"""
