"""Write one variant of a case as a script that stands alone."""
