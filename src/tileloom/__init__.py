"""tileloom: attention as the textbook writes it; the compiler derives the fast kernel and shows why."""

__version__ = "0.1.0"

__all__ = ["__version__"]
