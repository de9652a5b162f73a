"""Small wrong changes to a Python file, made from its syntax tree: the mutants.

Each is the file with one expression replaced: a sign flipped, a term dropped, a reduction changed,
a tensor detached, a comparison or a mask off by one, branches swapped, a loop ended early or not,
a constant changed. Left
alone are docstrings, type hints, decorators, names (strings), what is raised and its message, and
how an object is printed: none of it is arithmetic.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

DETACHED = """

_tensors_detached = []


def detached(value):
    if not getattr(value, "requires_grad", False):
        return value
    _tensors_detached.append(True)
    return value.detach()
"""
"""Added to the file of a mutant that detaches: where no gradient ever comes by, it is none."""

SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
REDUCTIONS = {
    "sum": "mean",
    "mean": "sum",
    "max": "min",
    "min": "max",
    "amax": "amin",
    "amin": "amax",
    "argmax": "argmin",
    "argmin": "argmax",
    "any": "all",
    "all": "any",
    "logsumexp": "amax",
    "softplus": "relu",
    "relu": "softplus",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
}
# Calls that give a tensor which may carry a gradient.
TENSORS = {
    *("relu", "softplus", "where", "lerp", "cat", "sqrt", "exp", "log", "log1p", "logsumexp"),
    *("softmax", "addcmul", "promote", "safe_norm", "normalize", "gather", "scatter", "square"),
    *("masked_fill", "index_add", "index_select", "sum", "mean", "amax", "need", "expect"),
    *("of_target", "hinge_to_center", "matmul", "cos", "sin", "clamp", "clamp_min", "pow"),
}
NOT_ARITHMETIC = {"extra_repr", "__repr__", "__str__", "__reduce__", "__deepcopy__"}


@dataclass(frozen=True)
class Mutant:
    """One change: ``before`` and ``after`` are the statement that holds it, on one line."""

    file: str
    line: int
    scope: str
    kind: str
    before: str
    after: str
    number: int
    """Which of several equal changes in equal statements of the scope, from 0."""
    source: str
    """The whole file with the change in it."""

    @property
    def key(self) -> str:
        """Names the change wherever in the file its statement has moved."""
        again = f" #{self.number}" if self.number else ""
        return f"{self.file} | {self.scope} | {self.before} | {self.after}{again}"


class Place:
    """An expression, the statement around it, and how to put another in its place."""

    def __init__(self, holder: ast.AST, field: str, index: int | None, scope: str) -> None:
        self.holder, self.field, self.index, self.scope = holder, field, index, scope

    @property
    def node(self) -> ast.expr:
        value = getattr(self.holder, self.field)
        return value if self.index is None else value[self.index]

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.holder, self.field, node)
        else:
            getattr(self.holder, self.field)[self.index] = node


def mutants(source: str, file: str) -> list[Mutant]:
    """All changes of a file, in the order of its text."""
    tree = ast.parse(source)
    offsets = _line_offsets(source)
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for place, roots in _places(tree):
        original = place.node
        before = _text(roots)
        for kind, replacement in _replacements(original):
            if kind == "detach" and not place.scope:
                continue
            place.put(replacement)
            after = _text(roots)
            place.put(original)
            identity = (place.scope, before, after)
            found.append(
                Mutant(
                    *(file, original.lineno, place.scope, kind, before, after, seen[identity]),
                    _spliced(source, offsets, original, replacement),
                )
            )
            seen[identity] += 1
    return sorted(found, key=lambda each: each.line)


def _text(roots: list[ast.AST]) -> str:
    return " ".join(" ".join(ast.unparse(root).split()) for root in roots)


def _line_offsets(source: str) -> list[int]:
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _spliced(source: str, offsets: list[int], original: ast.expr, new: ast.expr) -> str:
    raw = source.encode()
    assert original.end_lineno is not None
    assert original.end_col_offset is not None
    start = offsets[original.lineno - 1] + original.col_offset
    end = offsets[original.end_lineno - 1] + original.end_col_offset
    text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
    changed = (raw[:start] + text.encode() + raw[end:]).decode()
    return changed + DETACHED if "detached(" in ast.unparse(new) else changed


def _places(tree: ast.Module) -> Iterator[tuple[Place, list[ast.AST]]]:
    """Every expression that is computed, with what its text is shown with."""
    yield from _of_statements(tree.body, "")


def _of_statements(body: list[ast.stmt], scope: str) -> Iterator[tuple[Place, list[ast.AST]]]:
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Continue | ast.Break):
            block = ast.Module(body=body, type_ignores=[])
            yield from _inside(Place(block, "body", index, scope), None)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            name = f"{scope}.{statement.name}".lstrip(".")
            if statement.name in NOT_ARITHMETIC:
                continue
            if isinstance(statement, ast.FunctionDef):
                yield from _of_defaults(statement.args, name)
            yield from _of_statements(statement.body, name)
        elif isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom) or _is_text(statement):
            continue
        else:
            yield from _of_statement(statement, scope)


def _of_statement(statement: ast.stmt, scope: str) -> Iterator[tuple[Place, list[ast.AST]]]:
    blocks = [name for name in ("body", "orelse", "finalbody") if hasattr(statement, name)]
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "target", "targets", *blocks):
            continue
        if isinstance(statement, ast.AnnAssign) and "TypeAlias" in ast.unparse(
            statement.annotation
        ):
            continue
        for index, each in _several(value):
            place = Place(statement, field, index, scope)
            if isinstance(each, ast.expr):
                yield from _inside(place, [statement] if not blocks else None)
            elif isinstance(each, ast.withitem):
                yield from _inside(Place(each, "context_expr", None, scope), None)
    for name in blocks:
        yield from _of_statements(getattr(statement, name), scope)


def _of_defaults(arguments: ast.arguments, scope: str) -> Iterator[tuple[Place, list[ast.AST]]]:
    names = [*arguments.posonlyargs, *arguments.args]
    pairs = [("defaults", names[len(names) - len(arguments.defaults) :])]
    for field, of in (*pairs, ("kw_defaults", arguments.kwonlyargs)):
        for index, name in enumerate(of):
            default = getattr(arguments, field)[index]
            if default is not None:
                shown = ast.keyword(arg=name.arg, value=default)
                for place, _ in _inside(Place(shown, "value", None, scope), None):
                    yield place, [shown]


def _inside(place: Place, roots: list[ast.AST] | None) -> Iterator[tuple[Place, list[ast.AST]]]:
    """The expression and those in it. Of a statement with blocks only the expression is shown."""
    if roots is None:
        roots = [_Shown(place)]
    yield place, roots
    node = place.node
    if isinstance(node, ast.JoinedStr | ast.Lambda):
        return
    for field, value in ast.iter_fields(node):
        for index, each in _several(value):
            if isinstance(each, ast.expr) and field not in ("annotation", "func_type"):
                yield from _inside(Place(node, field, index, place.scope), roots)
            elif isinstance(each, ast.keyword):
                yield from _inside(Place(each, "value", None, place.scope), roots)
            elif isinstance(each, ast.comprehension):
                yield from _inside(Place(each, "iter", None, place.scope), roots)
                for number in range(len(each.ifs)):
                    yield from _inside(Place(each, "ifs", number, place.scope), roots)


class _Shown(ast.Expression):
    """The expression that stands in a place, whichever it is now."""

    def __init__(self, place: Place) -> None:
        super().__init__(body=place.node)
        self.place = place

    def __getattribute__(self, name: str) -> object:
        if name == "body":
            return object.__getattribute__(self, "place").node
        return super().__getattribute__(name)


def _several(value: object) -> list[tuple[int | None, object]]:
    return list(enumerate(value)) if isinstance(value, list) else [(None, value)]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _replacements(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.BinOp):
        yield from _of_operation(node)
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return  # its constant is changed, and -1 as an index is no sign
        yield "sign" if isinstance(node.op, ast.USub) else "mask", node.operand
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = COMPARISONS[type(operator)]()
            yield "comparison", changed
    elif isinstance(node, ast.BoolOp):
        changed_all = copy.deepcopy(node)
        changed_all.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "mask", changed_all
    elif isinstance(node, ast.IfExp):
        yield "branches", ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Continue | ast.Break):
        yield "branches", ast.Break() if isinstance(node, ast.Continue) else ast.Continue()


def _of_operation(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    kind = type(node.op)
    if kind in SIGNS:
        yield "sign", ast.BinOp(left=node.left, op=SIGNS[kind](), right=node.right)
        if ast.unparse(node.right) != "1":  # a constant of its own: it becomes 0
            yield "term", node.left
        if kind is ast.Sub:
            yield "term", ast.UnaryOp(op=ast.USub(), operand=node.right)
        else:
            yield "term", node.right
    if kind in (ast.Add, ast.Sub, ast.Mult, ast.Div) and any(
        isinstance(each, ast.Call) for each in ast.walk(node)
    ):
        yield "detach", _detached(node)


def _of_constant(node: ast.Constant) -> Iterator[tuple[str, ast.expr]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant({0: 1, 1: 0}.get(value, value + 1))
    elif isinstance(value, float):
        yield "constant", ast.Constant(2 * value if value else 1.0)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Attribute) and name == "detach":
        yield "detach", function.value
    if isinstance(function, ast.Attribute) and name in REDUCTIONS:
        changed = copy.deepcopy(node)
        assert isinstance(changed.func, ast.Attribute)
        changed.func.attr = REDUCTIONS[name]
        yield "reduction", changed
    if isinstance(function, ast.Name) and name in ("max", "min"):
        yield "reduction", _renamed(node, REDUCTIONS[name])
    if name == "where" and len(node.args) == 3:
        condition, yes, no = node.args
        yield "branches", ast.Call(func=function, args=[condition, no, yes], keywords=node.keywords)
    if name in TENSORS:
        yield "detach", _detached(node)


def _renamed(node: ast.Call, name: str) -> ast.Call:
    return ast.Call(func=ast.Name(id=name), args=node.args, keywords=node.keywords)


def _detached(node: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Name(id="detached"), args=[node], keywords=[])
