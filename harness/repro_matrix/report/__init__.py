"""Write results for people: one HTML page, a static site, and files for other programs.

view.py (pure) says what is to be shown of a document, the templates how; nothing is judged here.
"""
