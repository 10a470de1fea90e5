"""Interpreters: the meaning of both IRs in NumPy."""
