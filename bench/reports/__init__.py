"""Presents records. `sources` reads records, `render` makes tables, and the other modules draw
charts."""
