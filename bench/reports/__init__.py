"""How records are shown: tables, plots, the page."""
