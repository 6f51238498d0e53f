"""How records are shown: `sources` reads, `render` makes tables, `plots`, `crossover` and `page` draw."""
