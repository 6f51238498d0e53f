"""How records are shown: `sources` reads, `render` makes tables, the others draw."""
