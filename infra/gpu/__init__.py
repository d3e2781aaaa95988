"""Checks of a GPU machine that has nothing of the project but this checkout and the model's five libraries."""
