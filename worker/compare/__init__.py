"""Recipes side by side: what each precision and input size costs and buys, and which to run."""
