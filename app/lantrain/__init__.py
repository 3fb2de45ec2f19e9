"""lantrain: train GPTs on the CPU machines that people already own."""

__version__ = "0.1.0"
