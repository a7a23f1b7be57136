"""The padded layout: rows share a right edge."""
