"""What a script imports before it does anything else: that much of its start a server may do for it. Pure.

Only whole import statements, in their order, from the first line on; the first other statement ends them, since it may
be what decides how the next one is imported (an environment variable, a path, a warning filter).
"""

from __future__ import annotations

import ast
from collections.abc import Collection


def imports(source: str, beside: Collection[str] = ()) -> tuple[str, ...]:
    """The statements, as text; () where they do not begin with torch being among them. ``beside``: the names of modules
    that lie in the script's folder, which are its own."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found, torch = [], False
    for index, node in enumerate(tree.body):
        if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # its docstring
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module == "__future__":
                continue
            names = [node.module]
        else:
            break
        tops = {name.partition(".")[0] for name in names}
        if tops & set(beside):
            break
        found.append(ast.unparse(node))
        torch = torch or "torch" in tops
    return tuple(found) if torch else ()
