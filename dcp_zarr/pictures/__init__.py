"""Pictures as text: HTML and SVG from rows, numbers and names. Knows no checkpoint and no torch."""
