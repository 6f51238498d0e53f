"""How records are shown: `sources` reads, `render` makes tables, `plots` and `page` draw."""
