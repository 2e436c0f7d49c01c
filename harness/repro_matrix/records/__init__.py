"""A cell's document: what it holds (types), where it is doubted (doubt), and its JSON Schema (schema). Pure."""
