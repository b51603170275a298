"""Fails where the tree reads worse than its bounds: words of our old dialect, vague names,
functions whose name is only a participle, class names used twice."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DIALECT = re.compile(
    r"\b(besides?|nobody|somebody|whoever|whom|anew|hears?|heard|told|meanwhile|thereby|till"
    r"|in vain|for good|goe?s? on|is to be|are to be|stands (for|at|in|still)|lies (in|at|on)"
    r"|but one"
    r"|of (which|whom)|has come|comes to|what (was|is) given|is told|are told|tells of|asks on"
    r"|looked after|look after|taken? up|given? up|carry on|as it stands)\b"
)
VAGUE = re.compile(
    r"told|heard|asked|given|found|said|beside|own|made|wanted|kept|passed|begun|held|known|hear"
    r"|tell|ours|others?|more|counted|met|seen|left|here|there|began|ended|lost|whole|again|apart"
    r"|elsewhere|alone|one"
)
PARTICIPLE = re.compile(
    r"[a-z]+(ed|told|said|made|found|kept|known|given|taken|shown|written|drawn|begun|heard|sent"
    r"|lost)"
)
BOUNDS = {
    "dialect words in 1,000 words of docs": 0.3,
    "dialect words in 1,000 words of docstrings": 0.3,
    "vague names, % of bindings": 0.5,
    "functions whose name is a participle": 20,
    "class names defined more than once": 20,
}


def figures() -> Iterator[float]:
    """In the order of BOUNDS."""
    trees = [ast.parse(path.read_text("utf-8")) for path in Path("src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    yield dialect([path.read_text("utf-8") for path in Path("docs").glob("*.md")])
    yield dialect([text for node in nodes if (text := text_of(node))])

    bindings = [name for node in nodes if (name := binding(node))]
    yield 100 * sum(bool(VAGUE.fullmatch(name)) for name in bindings) / len(bindings)

    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    yield sum(
        bool(PARTICIPLE.fullmatch(function.name.strip("_")))
        and not any("property" in ast.unparse(mark) for mark in function.decorator_list)
        for function in functions
    )

    classes = Counter(node.name.strip("_") for node in nodes if isinstance(node, ast.ClassDef))
    yield sum(count > 1 for count in classes.values())


def dialect(texts: list[str]) -> float:
    text = " ".join(texts).lower()
    return 1000 * len(DIALECT.findall(text)) / len(re.findall(r"[a-z']+", text))


def text_of(node: ast.AST) -> str:
    """A docstring, or the text under a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""


def binding(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


if __name__ == "__main__":
    worse = False
    for (name, bound), figure in zip(BOUNDS.items(), figures(), strict=True):
        worse |= figure > bound
        print(f"{name}: {figure:.1f} (at most {bound:g})")
    sys.exit(worse)
