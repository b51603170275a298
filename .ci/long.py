"""Warns of long files and functions of src, and never fails: no idea is split for a length."""

import ast
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 80


def main() -> None:
    root = Path(__file__).parents[1]
    for path in sorted((root / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(root)
        lines = len(source.splitlines())
        if lines > FILE_LINES:
            print(f"warning: {name} has {lines} lines, more than {FILE_LINES}")

        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                print(
                    f"warning: {name}:{node.lineno} {node.name} has {lines} lines, "
                    f"more than {FUNCTION_LINES}"
                )


if __name__ == "__main__":
    main()
