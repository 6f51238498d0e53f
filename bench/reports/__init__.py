"""Presents records. `sources` reads them, `render` makes tables, and the other modules draw
charts."""
