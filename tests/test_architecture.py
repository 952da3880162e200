"""The folder listing is the pipeline: data flows one way, and the imports show it."""

import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import roughflow

PACKAGE = Path(roughflow.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# In pipeline order: a stage imports only stages before it.
STAGES = [
    "sde",
    "driver",
    "rough",
    "flow",
    "transition",
    "density",
    "files",
    "train",
    "tables",
    "mcmc",
    "series",
    "latent",
]
ALLOWED = {stage: set(STAGES[:i]) for i, stage in enumerate(STAGES)} | {"rough": {"driver"}}
# So do the modules of the density stage: a point goes through each of them once.
DENSITY = [
    "draws",
    "estimate",
    "proposals",
    "modes",
    "paths",
    "bounds",
    "grid",
    "particles",
    "ladder",
    "flow",
]
# What every stage may use, in this order too.
COMMON = ["faq", "_checks", "_devices", "_functions", "_programs", "_linear", "_show"]
ALLOWED |= {part: set(COMMON[:i]) for i, part in enumerate(COMMON)}
# These stand on top and see only what a user sees: `import roughflow`.
ON_TOP = {"interop", "cli", "plots", "datasets", "experiments", "report"}
# Where a package outside may be imported.
CONFINED = {
    "optax": {"train"},
    "diffrax": {"driver", "flow", "density", "series"},
    "matplotlib": {"plots", "experiments", "report"},
}
# Words that CONTRIBUTING.md has others for; only what reads old files knows them.
RETIRED = {"law", "laws"}
KNOWS_OLD_NAMES = PACKAGE / "files.py"
MAX_FILES, MAX_FILES_IN_FOLDER = 130, 15
HEAVY = ["matplotlib", "sklearn", "torch", "numpyro", "blackjax", "arviz"]
HEAVY += ["scipy.linalg", "scipy.stats", "scipy.optimize", "scipy.special"]


@functools.cache
def nodes_of(file):
    """The syntax of a file, node by node."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def part_of(file):
    """The stage a file belongs to; "" for the package's own `__init__` and the names it has."""
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if part in ("__init__", "_public") else part


def imports(file):
    """The absolute names of all modules a file imports, wherever in it."""
    package = ["roughflow", *file.relative_to(PACKAGE).parent.parts]
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import sde` imports a module by the name after `import`.
            yield from (f"{module}.{alias.name}" if module == "roughflow" else module for alias in node.names)


def check(file, part, name):
    """What is wrong with one import, or None."""
    top, _, rest = name.partition(".")
    if top != "roughflow":
        if part not in CONFINED.get(top, {part}):
            return f"{file} imports {top}, which belongs in {sorted(CONFINED[top])}"
        return None
    target = rest.partition(".")[0]
    if part in ON_TOP:
        # The checks of arguments are for all.
        private = target not in (part, "_checks") and any(word.startswith("_") for word in rest.split("."))
        return f"{file} imports the private {name}" if private else None
    if part and target not in ALLOWED[part] | {part} | (set() if part in COMMON else set(COMMON)):
        return f"{file} imports {name}, which comes after {part}"
    return None


def modules():
    """All modules of the package by name, and a function from a name to the modules that it imports."""
    dotted = lambda file: ".".join(["roughflow", *file.relative_to(PACKAGE).with_suffix("").parts])
    files = {dotted(file).removesuffix(".__init__"): file for file in FILES}

    def imported(name):
        package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
        nodes = nodes_of(files[name])
        for_types = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        skipped = {id(node) for block in for_types for node in ast.walk(block)}
        for node in nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                base = parts[: len(parts) + 1 - node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield inner if inner in files else module

    return files, lambda name: {other for other in imported(name) if other in files and other != name}


def cycle_in(names, imported):
    """The modules of a cycle of imports, or an empty list."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        found = next(filter(None, map(visit, sorted(imported(name)))), [])
        path.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, sorted(names))), [])


def test_no_module_imports_itself_through_others():
    """Imports inside functions count too; those for the type checker alone do not."""
    files, imported = modules()
    assert cycle_in(files, imported) == []
    assert cycle_in("abc", {"a": "b", "b": "c", "c": "b"}.__getitem__) == ["b", "c"]


def test_the_package_is_small():
    assert len(FILES) <= MAX_FILES
    counts = Counter(str(file.parent.relative_to(PACKAGE)) for file in FILES)
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_every_part_has_its_place():
    assert {part_of(file) for file in FILES} <= {"", *ALLOWED, *ON_TOP}


def test_imports_keep_the_order():
    wrong = [
        problem
        for file in FILES
        for name in imports(file)
        if (problem := check(file.relative_to(PACKAGE), part_of(file), name))
    ]
    assert wrong == []


def test_the_modules_of_the_density_stage_keep_their_order():
    """Draws know no proposal, a proposal no estimator, and a rung of the ladder not the next one."""
    files = {file.stem.removeprefix("_"): file for file in (PACKAGE / "density").glob("_[a-z]*.py")}
    assert set(files) <= set(DENSITY)
    later = lambda name: tuple(f"roughflow.density._{other}" for other in DENSITY[DENSITY.index(name) :])
    wrong = [(name, used) for name in files for used in imports(files[name]) if used.startswith(later(name))]
    assert wrong == []


def test_the_order_is_really_read():
    """The check sees what it should, in each form an import can take."""
    file = PACKAGE / "sde" / "_sde.py"
    assert "roughflow._checks" in set(imports(PACKAGE / "sde" / "_correction.py"))
    assert "roughflow.density._paths" in set(imports(PACKAGE / "density" / "_ladder.py"))
    assert check(file, "sde", "roughflow.flow") is not None
    assert check(file, "sde", "roughflow.StochasticFlow") is not None
    assert check(file, "sde", "optax") is not None
    assert check(file, "flow", "roughflow.driver") is None
    assert check(file, "rough", "roughflow.sde") is not None
    assert check(file, "flow", "roughflow._programs") is None
    assert check(file, "_checks", "roughflow._programs") is not None
    assert check(file, "interop", "roughflow.flow._flow") is not None


def test_functions_fit_on_a_screen():
    lengths = {
        f"{file.relative_to(PACKAGE)}: {node.name}": length_of(node)
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def length_of(function):
    """Its lines, without its docstring."""
    lines = lambda node: node.end_lineno - node.lineno + 1
    documented = ast.get_docstring(function, clean=False) is not None
    return lines(function) - (lines(function.body[0]) if documented else 0)


def test_one_word_has_one_meaning():
    """No retired word in prose or as part of a name, `like_this` or `LikeThis`."""
    words = lambda file: {
        word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", file.read_text("utf-8"))
    }
    old = {str(file.relative_to(PACKAGE)): words(file) & RETIRED for file in FILES if file != KNOWS_OLD_NAMES}
    assert {name: found for name, found in old.items() if found} == {}


def test_a_name_brings_no_later_stage_and_nothing_heavy():
    """`_public` says where each name is; one that is not there is refused."""
    code = f"""
        import sys, roughflow
        roughflow.FixedGrid, roughflow.flow
        later = ("transition", "density", "files", "train", "tables", "mcmc", "series", "latent")
        print([stage for stage in later if f"roughflow.{{stage}}" in sys.modules])
        roughflow.fit
        print([name for name in {HEAVY} if name in sys.modules])
        from roughflow import _public
        names = [name for name in roughflow.__all__ if name != "plots"]
        same = [getattr(roughflow, name) is getattr(_public, name) for name in names]
        print(50 < len(same) < 75 and all(same), hasattr(roughflow, "no_such_name"))
        try:
            roughflow.Sobol
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    told = "module 'roughflow' has no attribute 'Sobol': it is rf.density.Sobol"
    assert done.stdout.splitlines() == ["[]", "[]", "True False", told]
