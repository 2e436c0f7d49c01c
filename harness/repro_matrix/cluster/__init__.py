"""Run the matrix in jobs of a cluster."""
