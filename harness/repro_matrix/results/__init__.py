"""What was measured, as it is stored, published, and counted."""
