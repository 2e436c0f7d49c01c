"""What differs between two sets of measurements: briefs of documents (brief.py, read by sides.py) are compared
(compare.py, noise.py) and put into words (show.py)."""
