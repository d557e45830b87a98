"""A scripted night of a small fleet, and whether what is told of it is true: ``make night``."""
