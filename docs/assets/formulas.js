// Typeset the formulas that pymdownx.arithmatex marks: \( … \) inline, \[ … \] displayed.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
