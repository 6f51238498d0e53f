"""What every command shares: flags, inputs, processes, timing, records."""
