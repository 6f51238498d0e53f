"""What `tune_tiles` and `tune_thresholds` search, pair and check."""
