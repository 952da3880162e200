"""List the benchmarks, or run one: `python -m benchmarks [NAME] [options of the benchmark]`."""

import ast
import runpy
import sys
from pathlib import Path


def descriptions() -> dict[str, str]:
    """For every module that can be run, the first line of its docstring, without the command."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = file.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in text:
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[file.stem] = first.partition(": `python")[0].rstrip(".")
    return found


def main() -> None:
    known = descriptions()
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name is None:
        print("Run one with `make bench NAME=…`; `make bench NAME=… OPTIONS=--help` lists its options.\n")
        print("\n".join(f"  {name:{max(map(len, known))}}  {text}" for name, text in known.items()))
    elif name not in known:
        sys.exit(f"there is no benchmark {name!r}: run `make bench` for the list")
    else:
        sys.argv = sys.argv[1:]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
