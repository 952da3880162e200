"""The pages in a real browser: `make test-browser`, which needs Chromium. Wide and narrow, light and dark."""

import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
SITE = Path(__file__).parents[1] / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FAULTS = """() => {
    const root = document.documentElement, images = [...document.querySelectorAll("img")];
    const wide = root.scrollWidth > root.clientWidth ? [`${root.scrollWidth} px wide`] : [];
    const formulas = [...document.querySelectorAll(".arithmatex")];
    return wide.concat(
        images.filter(i => !i.naturalWidth).map(i => `no picture ${i.src}`),
        formulas.filter(f => !f.querySelector(".katex-html")).map(f => `not typeset: ${f.textContent}`),
    );
}"""

pytestmark = [
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="build the pages first: make docs"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_pages_fit_and_nothing_is_missing(browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults = []
    # A server shows 404.html, from any folder.
    for file in sorted(set(SITE.rglob("*.html")) - {SITE / "404.html"}):
        page, name = context.new_page(), file.relative_to(SITE)
        told = lambda what, name=name: faults.append(f"{name}: {what}")
        page.on("console", lambda message, told=told: message.type == "error" and told(message.text))
        page.on("pageerror", lambda error, told=told: told(error))
        page.on("requestfailed", lambda request, told=told: told(f"no {request.url}"))
        page.goto(file.as_uri())
        for fault in page.evaluate(FAULTS):
            told(fault)
        page.close()
    context.close()
    assert not faults


def test_search_finds_a_page_without_a_network(browser):
    page = browser.new_page()
    page.goto((SITE / "index.html").as_uri())
    page.fill(".md-search__input", "measurement noise")
    page.wait_for_selector(".md-search-result__item", timeout=10_000)
    assert "series" in page.get_attribute(".md-search-result__link", "href")
