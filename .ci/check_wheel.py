"""Install a wheel into a clean environment and run the README's example and the demo there.

python .ci/check_wheel.py dist/roughflow-0.2.0-py3-none-any.whl
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
TIMED_IMPORT = """
import time
began = time.perf_counter()
import roughflow
print(f"import roughflow: {time.perf_counter() - began:.2f} s")
"""


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    # Run outside the clone, so that its folder roughflow/ is not imported.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        bin = Path(folder) / "env" / "bin"

        def run(name: str, *command: str | Path) -> None:
            began = time.perf_counter()
            subprocess.run(command, cwd=folder, env=environment, check=True)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)

        run("install", bin / "python", "-m", "pip", "install", "--quiet", f"{wheel}[plots]")
        run("version", bin / "roughflow", "--version")
        run("import", bin / "python", "-c", TIMED_IMPORT)
        blocks = re.findall(
            r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        run("README", bin / "python", "-c", "\n".join(blocks))
        run("demo", bin / "roughflow", "demo", "--quiet", "--out", "figures")
        assert (Path(folder) / "figures" / "demo.html").exists()


if __name__ == "__main__":
    main()
