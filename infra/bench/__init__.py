"""Measurements: each module prints a table and, at its end, one line of JSON."""
