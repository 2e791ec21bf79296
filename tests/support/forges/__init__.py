"""Data made by hand: rows, trails, messages and requests; whole, damaged or hostile."""
