"""Postgres: the tables, the migrations that make them, and every statement that reads or writes them."""
