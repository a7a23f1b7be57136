"""Everything that knows transformers from the inside."""
