"""What is public is documented, and every example in the README and the docstrings runs as it stands."""

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import roughflow as rf
from roughflow import _public

README = Path(__file__).parents[1] / "README.md"
# Made by the library, never by the user.
NO_EXAMPLE = {
    "Outcome",
    "Field",
    "Fitted",
    "Score",
    "History",
    "NonFiniteError",
    "OutOfStepsError",
}
NO_EXAMPLE |= {
    "Score",
    "Chain",
    "SamplerState",
    "SamplerInfo",
    "AbstractSampler",
    "Tuned",
    "WarmedUp",
    "EvidenceBound",
    "Prediction",
}

# One process for all examples: what one compiles, the next finds compiled. It is a fresh one, so that they
# run with JAX's own defaults and not with the tests' float64.
RUNNER = """
import gc, json, sys, traceback
gc.set_threshold(100_000, 20, 50)
failures = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        failures[name] = traceback.format_exc(limit=-3)
print(json.dumps(failures))
"""


def public():
    """The public objects by name, those of the stages too: classes and functions, not modules."""
    names = {name: value for name, value in vars(_public).items() if not name.startswith("_")}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def docstring(value):
    """The text its author wrote; a dataclass without any is given its signature."""
    text = inspect.cleandoc(value.__doc__ or "")
    return "" if text.startswith(f"{value.__name__}(") else text


def examples(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def docstrings():
    """Docstrings of the public objects and of the methods written in them."""
    for name, value in public().items():
        yield name, docstring(value)
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", docstring(function)


def test_every_public_object_has_a_docstring():
    assert [name for name, value in public().items() if not docstring(value)] == []


def test_every_public_object_has_an_example():
    needed = {name for name in public() if not name.startswith("Abstract")} - NO_EXAMPLE
    assert [name for name in sorted(needed) if not examples(docstring(public()[name]))] == []


# Examples of these take long to compile: of whole stages, and some others.
SLOW = {"density", "files", "train", "tables", "mcmc", "series", "latent"}
LONG = {"StochasticFlow.estimate", "Estimate", "SampledCorrection", "HutchinsonDivergence"}
LONG |= {"LocalDiffusion", "SkewNetwork", "RoughPath", "Davie", "ShortTime", "AbstractStochasticFlow"}
LONG |= {"LinearlyImplicitEuler", "Milstein", "VelocityNetwork", "to_diffrax", "tune_steps"}


def takes_long(name):
    """Whether the example of a public object, or of a method of one, does."""
    return name in LONG or public()[name.partition(".")[0]].__module__.split(".")[1] in SLOW


PAGES = (
    "index",
    "densities",
    "learning",
    "tutorials/sde",
    "tutorials/table",
    "tutorials/samples",
    "tutorials/series",
    "tutorials/heat",
    "series",
    "latent",
    "gallery",
    "rough",
)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run(page, tmp_path):
    """The blocks of a page may build on one another."""
    text = (README.parent / f"docs/{page}.md").read_text(encoding="utf-8")
    run({page: "```python\n" + "".join(examples(text)) + "```\n"}, tmp_path)


def of_module(module):
    """The docstrings of a module that is public as a whole, and of its functions."""
    ours = lambda value: inspect.isfunction(value) and value.__module__.startswith(module.__name__)
    names = getattr(module, "__all__", vars(module))
    own = {name: vars(module)[name] for name in names if ours(vars(module)[name])}
    texts = {name: docstring(value) for name, value in own.items() if not name.startswith("_")}
    return {module.__name__: module.__doc__ or ""} | {f"{module.__name__}.{n}": t for n, t in texts.items()}


def test_every_function_of_a_public_module_has_an_example():
    for module in (rf.datasets, rf.plots):
        assert [name for name, text in of_module(module).items() if not examples(text)] == []


def _found(path):
    """The object that `rf.a.b` names."""
    return functools.reduce(getattr, path.split(".")[1:], rf)


def test_examples_name_what_there_is():
    """Those of `make test-all` too: they parse, and what they take from the library is there."""
    texts = dict(docstrings()) | of_module(rf.datasets) | of_module(rf.plots)
    texts |= {page: (README.parent / f"docs/{page}.md").read_text(encoding="utf-8") for page in PAGES}
    for name, text in texts.items():
        for node in ast.walk(ast.parse("".join(examples(text)), name)):
            path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"rf(\.[a-z_]+)?\.\w+", path):
                place, _, attribute = path.rpartition(".")
                place = _found(place)
                assert not inspect.ismodule(place) or hasattr(place, attribute), f"{name}: there is no {path}"


def test_prose_names_what_there_is():
    """Pages, docstrings, messages and the newest part of the changelog name objects where they are."""
    root = README.parent
    files = [README, *root.glob("docs/**/*.md"), *root.glob("roughflow/**/*.py")]
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
    texts["CHANGELOG.md"] = (root / "CHANGELOG.md").read_text(encoding="utf-8").partition("## 0.1.0")[0]
    for file, text in texts.items():
        for path in set(re.findall(r"(?<![\w./])rf(?:\.\w+){1,2}", text)):
            place, _, attribute = path.rpartition(".")
            place = _found(place)
            # Attributes of instances, such as rf.Estimate.method, are fields.
            assert not inspect.ismodule(place) or hasattr(place, attribute), f"{file}: there is no {path}"


def test_examples_run(tmp_path):
    """All but the slow ones at once: importing takes longer than most of them."""
    quick = {name: text for name, text in docstrings() if not takes_long(name)}
    run({"README.md": README.read_text(encoding="utf-8")} | quick, tmp_path)


@pytest.mark.slow
def test_examples_that_take_long_run(tmp_path):
    slow = {name: text for name, text in docstrings() if takes_long(name)}
    run(slow | of_module(rf.datasets) | of_module(rf.plots), tmp_path)


def run(sources, folder):
    blocks = {
        f"{name} example {i}": block
        for name, text in sources.items()
        for i, block in enumerate(examples(text))
    }
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(README.parent)},
    )
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout.splitlines()[-1])
    assert not failures, "\n".join(f"{name}:\n{reason}" for name, reason in failures.items())
