"""Presents records: `sources` reads them, `render` makes tables, the other modules draw."""
