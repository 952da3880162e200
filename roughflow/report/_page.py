"""One page of HTML that needs nothing beside it. All text is escaped here, and nowhere else."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

DPI = 180

STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2329; --soft: #5b6670; --paper: #fff; --line: #d9dee3; --warn: #fff4e5 }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line) }
p { margin: .4rem 0; max-width: 46rem }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .25rem 1.2rem; margin: 0 }
dt { color: var(--soft) }
dd { margin: 0; font-variant-numeric: tabular-nums }
ul { margin: .4rem 0; padding: .6rem 1rem .6rem 2rem; background: var(--warn); border-radius: .4rem }
.figures { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0; max-width: 32rem }
figcaption { font-size: .9rem; color: var(--soft) }
img { display: block; width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa5af; --paper: #171717; --line: #363d44; --warn: #3a2e1c }
  img { filter: invert(.91) hue-rotate(180deg) }  /* white turns into the page's own dark; hues stay */
}
"""


def page(title: str, sections: Sequence[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def section(heading: str, *parts: str) -> str:
    """Under its heading, what the functions below made."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def pairs(entries: Mapping[str, str]) -> str:
    """Names and what they are, in two columns."""
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>\n{rows}\n</dl>"


def bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def figures(drawn: Mapping[str, Figure]) -> str:
    """Figures by their captions, side by side where there is room."""
    return '<div class="figures">\n' + "\n".join(_figure(*one) for one in drawn.items()) + "\n</div>"


def _figure(caption: str, figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    image = base64.b64encode(buffer.getvalue()).decode()
    text = escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{image}" alt="{text}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
