"""Run the Python blocks of pages and write what they print below each block: `make pages`.

    python docs/_execute.py docs/tutorials/sde.md …

The blocks of a page share one namespace. What a block prints replaces the ```text block that follows it, or
becomes a new one. Figures that a block saves go to docs/images/.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?P<output>\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL
)
IMAGES = Path(__file__).parent / "images"


def execute(page: Path) -> None:
    """Run the blocks of one page in order and rewrite it with their output."""
    namespace = {"__name__": "__main__"}

    def with_output(match: re.Match) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match["code"], str(page), "exec"), namespace)
        lines = [line.rstrip() for line in printed.getvalue().strip("\n").splitlines()]
        output = "\n```text\n" + "\n".join(lines) + "\n```\n" if lines else ""
        return f"```python\n{match['code']}```\n{output}"

    text = page.read_text(encoding="utf-8")
    page.write_text(BLOCK.sub(with_output, text), encoding="utf-8")


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.dpi": 160,
    }
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    IMAGES.mkdir(exist_ok=True)
    for page in pages:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            execute(page)
            for figure in Path().glob("*.png"):
                shutil.copy(figure, IMAGES)
        print(f"{page.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
