"""Each guard's mark says how to remove it, and the tool that removes guards edits and notes what it says."""

import ast

import guards
import pytest


def test_every_guard_can_be_removed():
    found = list(guards.find_guards())
    assert len(found) > 300
    for guard in found:
        source = (guards.ROOT / guard.file).read_text(encoding="utf-8")
        removed = guards.edits(source, guard)[0]
        assert guards.MARK.sub("", removed) != guards.MARK.sub("", source), guard
        if guard.file.endswith(".py"):
            ast.parse(removed)


@pytest.mark.parametrize(
    ("kind", "marked", "removed"),
    [
        ("never", "if odd:  # MARK\n    pass", "if False:\n    pass"),
        ("never", "if a:\n    pass\nelif odd:  # MARK\n    pass", "if a:\n    pass\nelif False:\n    pass"),
        ("never", "while (\n    odd\n    and even\n):  # MARK\n    pass", "while False:\n    pass"),
        ("never", "if any(x for x in odd if x):  # MARK\n    pass", "if False:\n    pass"),
        ("never", "y = 1 if odd else 2  # MARK", "y = 1 if False else 2"),
        ("never", "for x in odd:  # MARK\n    pass", "for x in ():\n    pass"),
        ("never", "try:\n    f()\nexcept Odd as e:  # MARK\n    pass", "try:\n    f()\nexcept () as e:\n    pass"),
        ("always", "y = [x for x in odd if x]  # MARK", "y = [x for x in odd if True]"),
        (
            "always",
            "if y := [\n    x\n    for x in odd\n    if x  # MARK\n]:\n    pass",
            "if y := [x for x in odd if True]: pass",
        ),
        ("skip", "refuse(\n    odd  # MARK\n)", "pass"),
        ("skip", "class A:\n    @odd\n    def f(self):  # MARK\n        return 1", "class A:\n    pass"),
        ("skip", "with odd(1):  # MARK\n    f()", f"with {guards.NO_CONTEXT}:\n    f()"),
        ("operand", "if a or b or odd:  # MARK\n    pass", "if a or b:\n    pass"),
        ("operand", "y = a and (\n    odd  # MARK\n    or b\n)", "y = a and b"),
        ("operand", "y = a and (b or odd)  # MARK", "y = a"),
        ("first", "y = fair(é[0])  # MARK", "y = é[0]"),
        ("first", "y: Annotated[int, Field(ge=0)]  # MARK", "y: int"),
        ("1 -> 2", "y = f(\n    # MARK\n    a=1,\n)", "y = f(a=2)"),
        ("and odd ->", "if even and odd:  # MARK\n    odd()", "if even:\n    odd()"),
        ("y = 1", "# MARK\ny = odd(x)", "y = 1"),
    ],
)
def test_each_kind_of_removal_edits_the_marked_line(tmp_path, kind, marked, removed):
    (tmp_path / "spes_p2p").mkdir()
    (tmp_path / "spes_p2p" / "f.py").write_text(marked := marked.replace("MARK", f"guard: {kind}"))
    (guard,) = guards.find_guards(tmp_path)
    assert ast.dump(ast.parse(guards.edits(marked, guard)[0])) == ast.dump(ast.parse(removed))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("never", "f()"),
        ("never", "y = [a if b else c, d if e else f]"),
        ("always", "for x in y: \n    pass"),
        ("operand", "y = a"),
        ("first", "y = f(1) + g(2)"),
        ("skip", "# nothing"),
        ("drop", "y = a"),
        ("a -> b", "a = a"),
    ],
)
def test_a_removal_that_does_not_fit_the_line_is_refused(kind, line):
    with pytest.raises(ValueError):
        guards.edits(line, guards.Guard("f.py", 1, kind))
