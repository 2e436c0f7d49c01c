"""Search releases, packages, commits and settings for the one that changes an answer."""
